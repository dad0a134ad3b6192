"""Who is there: engines, the agents of their ranks, and what each tenant holds."""
