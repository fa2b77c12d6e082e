"""Adapters to other tools, thin: no estimation logic. Import as launchguard.integrations, never as integrations."""
