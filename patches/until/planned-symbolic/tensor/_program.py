"""Before a program is asked for another plan than its own."""


class Program(...):
    cost = ...
