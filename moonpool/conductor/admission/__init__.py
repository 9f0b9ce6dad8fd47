"""Admission: the forms of early rejection, the forecasts of decode load, and the fair queue of waiting requests."""
