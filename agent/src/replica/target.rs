//! [`Target`]: what is known of the replica's server before a sync.

use super::conversion::Conversion;
use super::link_login::{LinkLogin, PrimaryLogin};
use super::record::Record;
use crate::server::{CONVERTED, Facts, TlsOptions};

/// Facts about the replica's server.
#[derive(Debug)]
pub(super) struct Target {
    pub(super) facts: Facts,
    /// How it logs in to its primary.
    pub(super) login: PrimaryLogin,
    /// How it logs in at our link.
    pub(super) link_login: LinkLogin,
    /// Whether it requires TLS to its primary, and so at the link.
    pub(super) tls_replication: bool,
    /// The certificates that it then uses, as far as the agent can read them.
    pub(super) tls: TlsOptions,
    /// The value of `repl-diskless-load`.
    pub(super) diskless_load: Option<String>,
    /// The number of databases (`databases`).
    pub(super) databases: Option<u32>,
    /// Whether it tries to load snapshots of formats that it does not know (`rdb-version-check relaxed`).
    pub(super) reads_newer: bool,
    /// What the snapshot is converted to; `None`: it gets the primary's own.
    pub(super) conversion: Option<Conversion>,
    /// Whether it follows the link of a killed agent. What it holds is then the rest of an unfinished sync.
    pub(super) unfinished: bool,
}

impl Target {
    /// What the source is told of the server: its name and version, and whether the snapshot is converted for it.
    pub(super) fn name(&self) -> String {
        let name = self.facts.name();
        if self.conversion.is_some() { name + CONVERTED } else { name }
    }

    /// The primary that the server followed before the sync.
    pub(super) fn followed(&self, record: &Record) -> Option<(String, u16)> {
        match &self.facts.link {
            _ if self.unfinished => record.former(),
            link => link.as_ref().map(|link| (link.host.clone(), link.port)),
        }
    }
}
