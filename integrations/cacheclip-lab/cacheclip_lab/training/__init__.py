"""Making the auxiliary model a better selector: synthetic questions, and fine-tuning of a head set."""
