//! Regions of one host, shared by handing over the memory's descriptor. To be written.
