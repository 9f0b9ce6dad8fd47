"""Other engines on Moonpool's pool: each folder speaks one foreign API. Never imports Moonpool's own engine."""
