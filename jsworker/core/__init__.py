"""Words that every part uses: jobs, processors, events, errors, settings."""
