/* Writes into the log of the CRIU that loaded this plugin. */
#ifndef ICECORE_CRIU_SAY_H
#define ICECORE_CRIU_SAY_H

/* CRIU's own; 1 is an error. Weak: it is missing where no CRIU loads the plugin. */
extern void print_on_level(unsigned level, const char *format, ...) __attribute__((weak));
#define SAY(...) \
	do { \
		if (print_on_level) \
			print_on_level(1, "icecore: " __VA_ARGS__); \
	} while (0)

#endif
