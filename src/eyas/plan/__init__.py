"""What a target and its drafter will take and give on a machine, from configurations alone. No torch in this room."""
