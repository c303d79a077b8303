/* What the bindings are made of; see mod.rs beside it. Only types and constants are taken: functions are looked up at run time. */
#include <rdma/rdma_cma.h>
