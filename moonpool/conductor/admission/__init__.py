"""Who is let in: the forms of early rejection, the forecast they ask, and the fair queue of those that wait."""
