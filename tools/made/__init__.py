"""What of the pages is made from the code and from records of runs, and how it is kept true."""
