"""Making the auxiliary model a better selector: synthetic questions, calibration of heads, fine-tuning."""
