//! The suites: other people's tests of replication.

use std::path::PathBuf;

use clap::ValueEnum;
use remora_bench::sync::Result;
use remora_lab::server::project_root;

use super::differs::Differs;

/// A suite. `dev/judge/setup` brings its sources and its programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Suite {
    /// Redis 7.0's, with Debian's server.
    #[value(name = "redis-7.0")]
    Redis,
    /// Valkey 8.1's, with Debian's server.
    #[value(name = "valkey-8.1")]
    Valkey,
}

impl Suite {
    /// Its name, and that of its folders.
    pub(super) fn name(self) -> &'static str {
        match self {
            Suite::Redis => "redis-7.0",
            Suite::Valkey => "valkey-8.1",
        }
    }

    /// The server's program.
    pub(super) fn server(self) -> &'static str {
        match self {
            Suite::Redis => "redis-server",
            Suite::Valkey => "valkey-server",
        }
    }

    /// The files that have to do with replication: every one in which a server takes a copy of another.
    pub(super) fn files(self) -> &'static [&'static str] {
        match self {
            Suite::Redis => REDIS,
            Suite::Valkey => VALKEY,
        }
    }

    /// Where its sources and programs are.
    pub(super) fn cache(self) -> Result<PathBuf> {
        let folder = project_root().join(".cache/judge").join(self.name());
        if folder.join("source").is_dir() && folder.join("programs").is_dir() {
            return Ok(folder);
        }
        Err(format!("{} is not there: dev/judge/setup said above why it was left out", self.name()).into())
    }

    /// What is ours: how its sources are adapted, and the list of differences.
    pub(super) fn ours(self) -> PathBuf {
        project_root().join("dev/judge").join(self.name())
    }

    /// The list of tests that are known to fail with Remora.
    pub(super) fn differs(self) -> Result<Differs> {
        let path = self.ours().join("differs");
        let text = std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let differs = Differs::read(&text).map_err(|error| format!("{}: {error}", path.display()))?;
        if let Some(file) = differs.files().find(|file| !self.files().contains(file)) {
            return Err(format!("{}: {file} is not a file that is run", path.display()).into());
        }
        Ok(differs)
    }
}

const REDIS: &[&str] = &[
    "integration/block-repl",
    "integration/failover",
    "integration/psync2",
    "integration/psync2-master-restart",
    "integration/psync2-pingoff",
    "integration/psync2-reg",
    "integration/redis-cli",
    "integration/replication",
    "integration/replication-2",
    "integration/replication-3",
    "integration/replication-4",
    "integration/replication-buffer",
    "integration/replication-psync",
    "integration/shutdown",
    "unit/cluster",
    "unit/cluster-scripting",
    "unit/cluster/announced-endpoints",
    "unit/cluster/links",
    "unit/cluster/misc",
    "unit/functions",
    "unit/wait",
];

/// Not among them is `integration/dual-channel-replication`: its tests watch how the primary itself sends a copy over
/// two channels, and wait for that until the suite gives up. The chaos draws dual channel.
const VALKEY: &[&str] = &[
    "integration/block-repl",
    "integration/failover",
    "integration/psync2",
    "integration/psync2-master-restart",
    "integration/psync2-pingoff",
    "integration/psync2-reg",
    "integration/replica-redirect",
    "integration/replication",
    "integration/replication-2",
    "integration/replication-3",
    "integration/replication-4",
    "integration/replication-buffer",
    "integration/replication-psync",
    "integration/shutdown",
    "integration/valkey-cli",
    "unit/cluster/diskless-load-swapdb",
    "unit/cluster/failover",
    "unit/cluster/failover2",
    "unit/cluster/manual-failover",
    "unit/cluster/no-failover-option",
    "unit/cluster/replica-in-sync",
    "unit/cluster/replica-migration",
    "unit/cluster/slave-selection",
    "unit/cluster/slot-migration",
    "unit/cluster/transactions-on-replica",
    "unit/cluster/update-msg",
    "unit/functions",
    "unit/wait",
];

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn every_list_of_differences_can_be_read() {
        for suite in Suite::value_variants() {
            suite.differs().unwrap();
        }
    }
}
