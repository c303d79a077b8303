//! The methods of making a replica, and the server settings that each needs.

use clap::ValueEnum;
use remora_lab::Kind;
use serde::{Deserialize, Serialize};

use super::tools::shake_program;

/// One method of making replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// The servers' own replication with default settings.
    OwnDefault,
    /// Own replication without disk at both ends, without delay, without compression.
    OwnBest,
    /// As [`Method::OwnBest`], with all replicas from one snapshot: the primary waits until all have connected. For one
    /// replica it is the same.
    OwnTogether,
    /// As [`Method::OwnTogether`], with two channels if the server has that (Valkey).
    OwnDual,
    /// As [`Method::OwnTogether`], and the primary compresses each value by LZF, as it does by default
    /// (`rdbcompression`).
    OwnCompressed,
    /// `GET` from the primary, `SET` at the replica, pipelined. Strings only, no point in time, and no stream
    /// afterwards.
    Copier,
    /// The copier one key after the other: it waits for each `GET` and each `SET`.
    CopierOneByOne,
    /// `redis-cli --rdb`, and a server that starts on the file as a replica of the primary. The result is an exact
    /// replica.
    RdbFile,
    /// RedisShake 4, which turns a snapshot into commands for a server of its own. No replica, and no stream
    /// afterwards.
    RedisShake,
    /// Remora beside a primary with default settings, over the first transport that works.
    RemoraDefault,
    /// As [`Method::RemoraDefault`], and the source changes two settings of the primary for the moment of the fork
    /// (`--tune-server`).
    RemoraTuned,
    /// Remora over shared memory, beside a primary with the settings of [`Method::OwnBest`].
    RemoraShm,
    /// Remora over TCP, each replica from the source.
    RemoraTcp,
    /// Remora over TCP, with replicas that feed each other.
    RemoraRelay,
    /// As [`Method::RemoraTcp`], with the default upload limit: a background transfer. The other methods over TCP have
    /// no limit unless they say so.
    RemoraTcpAuto,
    /// As [`Method::RemoraRelay`], with the default upload limit at the source and at the replicas.
    RemoraRelayAuto,
    /// As [`Method::RemoraRelay`], and the source leaves some of the cable free, with `--upload-limit`.
    RemoraRelayGentle,
    /// As [`Method::RemoraRelay`]; a replica that others read from is killed when it holds half of the snapshot.
    RemoraRelayKilled,
    /// Remora over shared memory, with our module in the primary and in the replicas' servers.
    RemoraModule,
    /// Remora over TCP, with replicas that feed each other and our module in the primary and in the replicas' servers.
    RemoraModuleRelay,
    /// As [`Method::RemoraModuleRelay`], and the source leaves some of the cable free, with `--upload-limit`.
    RemoraModuleRelayGentle,
    /// A replica that joins the snapshot which [`Method::RemoraShm`] has left at the source.
    RemoraLate,
    /// A replica with the module that joins the snapshot which [`Method::RemoraModule`] has left at the source.
    RemoraModuleLate,
    /// As [`Method::RemoraTcp`], and encrypted as it is between hosts by default: sealed tables, TLS for conversations.
    RemoraTcpSealed,
    /// As [`Method::RemoraRelay`], and encrypted and compressed as it is between hosts by default.
    RemoraRelaySealed,
    /// As [`Method::RemoraRelaySealed`], without compression.
    RemoraRelayUncompressed,
    /// As [`Method::RemoraRelaySealed`], with slots compressed by LZ4.
    RemoraRelayLz4,
    /// As [`Method::RemoraRelaySealed`], with slots compressed by Zstandard.
    RemoraRelayZstd,
}

/// A line of configuration: name and value.
pub type Setting = (&'static str, String);

impl Method {
    /// The name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Method::OwnDefault => "replication, defaults",
            Method::OwnBest => "replication, tuned",
            Method::OwnTogether => "replication, tuned, together",
            Method::OwnDual => "replication, tuned, dual channel",
            Method::OwnCompressed => "replication, tuned, LZF",
            Method::Copier => "GET/SET copier",
            Method::CopierOneByOne => "GET/SET copier, one by one",
            Method::RdbFile => "redis-cli --rdb, restart",
            Method::RedisShake => "RedisShake 4",
            Method::RemoraDefault => "Remora, defaults",
            Method::RemoraTuned => "Remora, defaults, tuned",
            Method::RemoraShm => "Remora shm, best",
            Method::RemoraTcp => "Remora tcp, best",
            Method::RemoraTcpAuto => "Remora tcp, best, upload auto",
            Method::RemoraRelayAuto => "Remora tcp, relay, upload auto",
            Method::RemoraTcpSealed => "Remora tcp, best, sealed",
            Method::RemoraRelay => "Remora tcp, relay",
            Method::RemoraRelaySealed => "Remora tcp, relay, sealed",
            Method::RemoraRelayUncompressed => "Remora tcp, relay, sealed, uncompressed",
            Method::RemoraRelayLz4 => "Remora tcp, relay, sealed, LZ4",
            Method::RemoraRelayZstd => "Remora tcp, relay, sealed, Zstandard",
            Method::RemoraRelayGentle => "Remora tcp, relay, upload limited",
            Method::RemoraRelayKilled => "Remora tcp, relay, one killed",
            Method::RemoraModule => "Remora shm, module",
            Method::RemoraModuleRelay => "Remora tcp, relay, module",
            Method::RemoraModuleRelayGentle => "Remora tcp, relay, module, upload limited",
            Method::RemoraLate => "Remora shm, late joiner",
            Method::RemoraModuleLate => "Remora shm, module, late joiner",
        }
    }

    /// Whether it is a method of Remora.
    pub fn is_ours(self) -> bool {
        self.transport().is_some()
    }

    /// Whether it is the servers' own replication.
    pub fn is_own(self) -> bool {
        use Method::{OwnBest, OwnCompressed, OwnDefault, OwnDual, OwnTogether};
        matches!(self, OwnDefault | OwnBest | OwnTogether | OwnDual | OwnCompressed)
    }

    /// Whether the servers load our module. For all other methods they run without it.
    pub fn has_module(self) -> bool {
        use Method::{RemoraModule, RemoraModuleLate, RemoraModuleRelay, RemoraModuleRelayGentle};
        matches!(self, RemoraModule | RemoraModuleLate | RemoraModuleRelay | RemoraModuleRelayGentle)
    }

    /// The method whose snapshot a late joiner joins.
    pub fn joins(self) -> Option<Method> {
        match self {
            Method::RemoraLate => Some(Method::RemoraShm),
            Method::RemoraModuleLate => Some(Method::RemoraModule),
            _ => None,
        }
    }

    /// The transport of `remora replica`.
    pub fn transport(self) -> Option<&'static str> {
        match self {
            Method::RemoraDefault | Method::RemoraTuned => Some("auto"),
            Method::RemoraShm | Method::RemoraLate | Method::RemoraModule => Some("shm"),
            Method::RemoraModuleLate => Some("shm"),
            Method::RemoraTcp | Method::RemoraModuleRelay | Method::RemoraModuleRelayGentle => Some("tcp"),
            Method::RemoraRelay | Method::RemoraRelayGentle | Method::RemoraRelayKilled => Some("tcp"),
            Method::RemoraTcpSealed | Method::RemoraRelaySealed => Some("tcp"),
            Method::RemoraTcpAuto | Method::RemoraRelayAuto => Some("tcp"),
            Method::RemoraRelayUncompressed | Method::RemoraRelayLz4 | Method::RemoraRelayZstd => Some("tcp"),
            Method::OwnDefault | Method::OwnBest | Method::OwnTogether | Method::OwnDual => None,
            Method::OwnCompressed => None,
            Method::Copier | Method::CopierOneByOne | Method::RdbFile | Method::RedisShake => None,
        }
    }

    /// Whether replicas feed each other, if the program has the option.
    pub fn serves_peers(self) -> Option<bool> {
        match self {
            Method::RemoraTcp | Method::RemoraTcpSealed | Method::RemoraTcpAuto => Some(false),
            Method::RemoraRelaySealed | Method::RemoraRelayUncompressed | Method::RemoraRelayAuto => Some(true),
            Method::RemoraRelayLz4 | Method::RemoraRelayZstd => Some(true),
            Method::RemoraRelay | Method::RemoraRelayGentle | Method::RemoraRelayKilled => Some(true),
            Method::RemoraModuleRelay | Method::RemoraModuleRelayGentle => Some(true),
            _ => None,
        }
    }

    /// Whether tables are sealed and conversations have TLS. The servers' own replication is measured without TLS, and
    /// so are all other methods.
    pub fn is_sealed(self) -> bool {
        matches!(self, Method::RemoraTcpSealed | Method::RemoraRelaySealed) || self.compress().is_some()
    }

    /// The source's `--compress`, if it is not the default.
    pub fn compress(self) -> Option<&'static str> {
        match self {
            Method::RemoraRelayUncompressed => Some("off"),
            Method::RemoraRelayLz4 => Some("lz4"),
            Method::RemoraRelayZstd => Some("zstd"),
            _ => None,
        }
    }

    /// Whether the source changes settings of the primary for the moment of the fork.
    pub fn tunes(self) -> bool {
        self == Method::RemoraTuned
    }

    /// The source's upload limit (`--upload-limit`), for a cable of `cable` bytes per second with all headers; `None`
    /// for the default. Replicas have the same, but a rate is the source's alone.
    pub fn upload_limit(self, cable: Option<u64>) -> Option<Upload> {
        match self {
            Method::RemoraDefault | Method::RemoraTuned | Method::RemoraTcpAuto | Method::RemoraRelayAuto => None,
            Method::RemoraRelayGentle | Method::RemoraModuleRelayGentle => {
                Some(cable.map_or(Upload::Unlimited, |cable| Upload::Rate(cable / 100 * GENTLE_PERCENT)))
            }
            _ => Some(Upload::Unlimited),
        }
    }

    /// Whether it has the default upload limit, over TCP.
    pub fn is_upload_auto(self) -> bool {
        matches!(self, Method::RemoraTcpAuto | Method::RemoraRelayAuto)
    }

    /// The method that differs from this one only in that it has no upload limit.
    pub fn unlimited(self) -> Option<Method> {
        match self {
            Method::RemoraTcpAuto => Some(Method::RemoraTcp),
            Method::RemoraRelayAuto | Method::RemoraRelayGentle => Some(Method::RemoraRelay),
            Method::RemoraModuleRelayGentle => Some(Method::RemoraModuleRelay),
            _ => None,
        }
    }

    /// Whether it works across hosts: it reads memory over a network, or needs none.
    pub fn crosses_hosts(self) -> bool {
        matches!(self.transport(), None | Some("tcp"))
    }

    /// Whether it differs from other methods for this number of replicas of that kind.
    pub fn applies(self, kind: Kind, replicas: usize) -> bool {
        match self {
            Method::OwnDual => kind == Kind::Valkey9,
            Method::OwnTogether => replicas > 1,
            // The relay, a replica that reads from it, and one from which that one can continue.
            Method::RemoraRelayKilled => replicas > 2,
            Method::RemoraLate | Method::RemoraModuleLate => replicas == 1,
            _ => true,
        }
    }

    /// Why it cannot be measured on this machine; `None` if it can.
    pub fn missing(self) -> Option<String> {
        match self {
            Method::RedisShake => shake_program().err(),
            _ => None,
        }
    }

    /// Whether the result is a server of its own that follows nothing: only its data are compared.
    pub(crate) fn only_copies(self) -> bool {
        matches!(self, Method::Copier | Method::CopierOneByOne | Method::RedisShake)
    }

    /// The primary's settings.
    pub fn primary_settings(self, kind: Kind, replicas: usize) -> Vec<Setting> {
        use Method::{Copier, CopierOneByOne, OwnDefault, RemoraDefault, RemoraTuned};
        if [OwnDefault, RemoraDefault, RemoraTuned, Copier, CopierOneByOne].contains(&self) {
            return Vec::new();
        }
        // The server begins as soon as that many replicas wait, and checks once a second; the delay is only the longest
        // wait.
        let own_waits = matches!(self, Method::OwnTogether | Method::OwnDual | Method::OwnCompressed);
        let together = (own_waits || matches!(self, Method::RdbFile | Method::RedisShake)) && replicas > 1;
        let compression = if self == Method::OwnCompressed { "yes" } else { "no" };
        let delay = if together { TOGETHER_SECONDS } else { "0" };
        let mut settings = vec![
            ("repl-diskless-sync", "yes".to_owned()),
            ("repl-diskless-sync-delay", delay.to_owned()),
            ("rdbcompression", compression.to_owned()),
        ];
        if together {
            settings.push(("repl-diskless-sync-max-replicas", replicas.to_string()));
        }
        settings.extend(self.primary_dual(kind));
        settings
    }

    /// The settings of the replicas' servers. With Remora they keep the defaults.
    pub fn replica_settings(self, kind: Kind) -> Vec<Setting> {
        let mut settings = Vec::new();
        if self.is_own() && self != Method::OwnDefault {
            settings.push(("repl-diskless-load", "on-empty-db".to_owned()));
        }
        settings.extend(self.dual(kind));
        settings
    }

    /// Whether the replica's server loads while the bytes arrive, so that transfer and load are one phase.
    pub(crate) fn loads_while_receiving(self) -> bool {
        !matches!(self, Method::OwnDefault | Method::RdbFile)
    }

    /// Remora asks for two channels if the primary has them switched on. Its replicas' servers need no setting.
    fn primary_dual(self, kind: Kind) -> Option<Setting> {
        if self.is_ours() { Method::OwnDual.dual(kind) } else { self.dual(kind) }
    }

    fn dual(self, kind: Kind) -> Option<Setting> {
        (self == Method::OwnDual && kind == Kind::Valkey9)
            .then(|| ("dual-channel-replication-enabled", "yes".to_owned()))
    }
}

/// An upload limit that is not the default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Upload {
    /// As fast as TCP does.
    Unlimited,
    /// Bytes per second.
    Rate(u64),
}

impl std::fmt::Display for Upload {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Upload::Unlimited => to.write_str(NO_LIMIT),
            Upload::Rate(rate) => rate.fmt(to),
        }
    }
}

/// No upload limit, on the command line.
pub(super) const NO_LIMIT: &str = "none";

/// Share of a cable's rate. TCP's payload is 95 % of it with packets of 1500 bytes; the rest is for other connections.
const GENTLE_PERCENT: u64 = 90;

/// Longer than it takes to start all replicas.
const TOGETHER_SECONDS: &str = "5";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_rival_has_worse_settings_than_ours() {
        let ours = Method::RemoraShm.primary_settings(Kind::Valkey9, 1);
        let theirs = Method::OwnDual.primary_settings(Kind::Valkey9, 1);
        assert!(ours.iter().all(|setting| theirs.contains(setting)), "{theirs:?}");
        let (ours, theirs) = (Method::RemoraShm, Method::OwnBest);
        assert_eq!(ours.primary_settings(Kind::Redis7, 1), theirs.primary_settings(Kind::Redis7, 1));
        for as_it_comes in [Method::RemoraDefault, Method::RemoraTuned] {
            assert!(as_it_comes.primary_settings(Kind::Redis7, 3).is_empty());
        }
        assert!(Method::OwnDefault.replica_settings(Kind::Redis7).is_empty());
    }

    #[test]
    fn only_valkey_has_two_channels() {
        let dual = ("dual-channel-replication-enabled", "yes".to_owned());
        assert!(Method::OwnDual.primary_settings(Kind::Valkey9, 3).contains(&dual));
        assert!(Method::OwnDual.replica_settings(Kind::Valkey9).contains(&dual));
        assert!(!Method::OwnDual.applies(Kind::Redis7, 3));
    }
}
