/* Preloaded into CRIU: its action script is started only for the stage in which it does something.
 *
 * icecore/dumper/freeze/waiting_criu.py makes CRIU wait by a script for the stage "pre-dump". CRIU
 * (4.0 to 4.2: criu/action-scripts.c) starts it four more times while the tree stands still, and
 * waits for its end. Each time, ICECORE_HOLD names the script, the process that CRIU forked for it
 * ends at once instead of starting a shell.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

__attribute__((visibility("default"))) int execvp(const char *file, char *const *arguments)
{
	const char *script = getenv("ICECORE_HOLD"), *stage = getenv("CRTOOLS_SCRIPT_ACTION");

	if (script && stage && !strcmp(file, script) && strcmp(stage, "pre-dump"))
		_exit(0);
	return execvpe(file, arguments, environ);
}
