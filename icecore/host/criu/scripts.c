/* Preloaded into CRIU: the action script is executed only for the stage "pre-dump", in which it does
 * something.
 *
 * icecore/dumper/freeze/waiting_criu.py makes CRIU wait with a script for that stage. While the tree
 * stands still, CRIU (4.0 to 4.2: criu/action-scripts.c) starts the script again for each later
 * stage, and waits until it ends: twice, and four times if the tree has a network namespace of its
 * own. ICECORE_HOLD names the script. For the later stages, the process that CRIU has forked for it
 * ends at once instead of executing a shell.
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
