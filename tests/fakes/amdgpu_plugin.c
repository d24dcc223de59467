/* A plugin of CRIU's that writes images laid out like amdgpu_plugin.so's, and demands them back at
 * the restore. See criu/include/criu-plugin.h. */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

extern int criu_get_image_dir(void);

static const char *const names[] = {
    "amdgpu-kfd-5.img", "amdgpu-renderD-6.img", "amdgpu-pages-5-0001.img"};
#define BYTES (3 << 20)

static unsigned char content(int file, int at)
{
	return (unsigned char)(at * 7 + file + (at >> 12));
}

static int init(int stage)
{
	static unsigned char data[BYTES];
	for (int file = 0; file < 3; file++) {
		int size = file == 2 ? BYTES : 1001 + file;
		int fd = openat(criu_get_image_dir(), names[file],
		    stage == 0 ? O_WRONLY | O_CREAT | O_TRUNC : O_RDONLY, 0600);
		if (fd < 0)
			return -1;
		if (stage == 0) { /* dump */
			for (int at = 0; at < size; at++)
				data[at] = content(file, at);
			if (write(fd, data, size) != size)
				return -1;
		} else {
			if (read(fd, data, BYTES) != size)
				return -1;
			for (int at = 0; at < size; at++)
				if (data[at] != content(file, at))
					return -1;
		}
		close(fd);
	}
	return 0;
}

static void finish(int stage, int result)
{
}

struct plugin {
	const char *name;
	int (*init)(int);
	void (*exit)(int, int);
	unsigned version, max_hooks;
	void *hooks[7];
};

struct plugin CR_PLUGIN_DESC = {"amdgpu_plugin", init, finish, 0x000200, 7, {0}};
