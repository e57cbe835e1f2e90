"""Who is there, and who talks to whom: ranks of several worlds meet in a place, the ranks of a Transfer have a group of
their own, and a rank that dies or stays away is named. Start reading at `meeting.Place`."""
