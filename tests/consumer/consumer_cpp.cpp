// The same consumer, compiled as C++.
#define MODULE_NAME "consumer_cpp"
#define MODULE_INIT PyInit_consumer_cpp
#include "consumer_c.c"
