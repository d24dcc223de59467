/* The interface of CRIU's plugins: criu-plugin.h of version 0.2.0. CRIU 4.0 is the first to have all
 * of these hooks.
 */

#ifndef ICECORE_CRIU_PLUGIN_H
#define ICECORE_CRIU_PLUGIN_H

enum { STAGE_DUMP, STAGE_PRE_DUMP, STAGE_RESTORE };
enum {
	DUMP_UNIX_SK,
	DUMP_EXT_FILE = 2,
	RESTORE_EXT_FILE,
	HANDLE_DEVICE_VMA = 7,
	UPDATE_VMA_MAP,
	RESUME_DEVICES_LATE,
	CHECKPOINT_DEVICES = 11,
	HOOKS
};

struct criu_plugin {
	const char *name;
	int (*init)(int stage);
	void (*exit)(int stage, int result);
	unsigned version, max_hooks;
	void *hooks[HOOKS];
};

/* Defines the plugin of a library. Further arguments: [HOOK] = function, ... */
#define CRIU_PLUGIN(title, begin, end, ...) \
	__attribute__((visibility("default"))) struct criu_plugin CR_PLUGIN_DESC = { \
	    .name = (title), \
	    .init = (begin), \
	    .exit = (end), \
	    .version = 0x200, \
	    .max_hooks = HOOKS, \
	    .hooks = {__VA_ARGS__}, \
	}

#endif
