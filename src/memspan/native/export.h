/* Before a function that Python calls: libraries of Windows export no other. */

#ifdef _WIN32
#define EXPORT __declspec(dllexport)
#else
#define EXPORT
#endif
