"""What some models or calls add to the reading of nodes: recurrent states, encoders, changing rotary, adapters."""
