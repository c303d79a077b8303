//! The agents as processes, on real servers. One program, so that it is linked once: each module holds the tests of one
//! subject, and `kit` what they share.
#![allow(clippy::unwrap_used)]

mod kit;

mod backup;
mod cli;
mod fetch;
mod in_the_machine;
mod metrics;
mod pages;
mod verify;
mod waits;

/// A server becomes an exact replica, whatever happens meanwhile.
mod sync {
    pub(crate) mod attend;
    mod attend_sources;
    mod broken;
    pub(crate) mod by_file;
    pub(crate) mod exact;
    mod fast_keys;
    mod handoff;
    mod input;
    mod many;
    pub(crate) mod module;
    pub(crate) mod primary;
    mod relay;
}

/// More than one server or source: clusters, Sentinels, changes of roles and families, and what starts agents.
mod fleet {
    mod cluster;
    mod kubernetes;
    mod migration;
    mod sentinel;
    mod service;
    mod sources;
    mod switch;
    mod versions;
}

/// What protects the data, and who tries to get it.
mod security {
    pub(crate) mod certificates;
    mod forging;
    pub(crate) mod protection;
    mod strangers;
}

/// `remora volume`.
mod volume {
    pub(crate) mod commands;
    mod volume_hosts;
    pub(crate) mod volume_mount;
}
