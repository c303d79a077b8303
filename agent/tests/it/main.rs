//! The agents as processes, on real servers. One program, so that it is linked once: each module holds the tests of one
//! subject, and `kit` what they share.
#![allow(clippy::unwrap_used)]

mod kit;

mod broken;
mod cli;
mod cluster;
mod combinations;
mod conversation;
mod ends;
mod exact;
mod expect_primary;
mod fast_keys;
mod fetch;
mod forging;
mod grants;
mod handoff;
mod history;
mod holders;
mod identity;
mod input;
mod late_joiner;
mod link;
mod load;
mod many;
mod memory;
mod module;
mod module_load;
mod module_memory;
mod module_rules;
mod module_types;
mod mtls;
mod primary;
mod probe;
mod rdma;
mod ready;
mod relay;
mod resume;
mod security;
mod server;
mod snapshot_mount;
mod status;
mod stay;
mod strangers;
mod taken_over;
mod tokens;
mod verify;
mod volume;
mod volume_certificates;
mod volume_guest;
mod volume_hosts;
mod volume_image;
mod volume_keep;
mod volume_mount;
mod volume_ways;
mod wire;
