"""The rooms behind `explain` and `draw`: what is shown, as values, and how it reads as text and as a picture."""
