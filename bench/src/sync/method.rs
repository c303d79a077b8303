//! The ways in which a replica can be made, and what each asks of the servers' settings.

use clap::ValueEnum;
use remora_lab::Kind;
use serde::{Deserialize, Serialize};

/// One way to make replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Method {
    /// The servers' own replication, as they come.
    OwnDefault,
    /// ... without disk at both ends, without delay, without compression.
    OwnBest,
    /// ... and all replicas of one snapshot: the primary waits until so many have come. The same as the former for one replica.
    OwnTogether,
    /// ... and by two channels besides, where the server has that (Valkey).
    OwnDual,
    /// `GET` from the primary, `SET` at the replica, pipelined. Strings only, no point in time, nothing that follows.
    Copier,
    /// ... one key after the other: each `GET` and each `SET` is waited for.
    CopierOneByOne,
    /// Remora beside a primary as it comes, by the first transport that works.
    RemoraDefault,
    /// Remora by shared memory, beside a primary with the settings of [`Method::OwnBest`].
    RemoraShm,
    /// ... by TCP, each replica from the source.
    RemoraTcp,
    /// ... by TCP, replicas that feed each other.
    RemoraRelay,
    /// ... and the source leaves the cable some room, by its `--upload-limit`.
    RemoraRelayGentle,
    /// ... one of which, that others read from, is killed when it holds half.
    RemoraRelayKilled,
    /// ... by shared memory, with our module in the primary and in the replicas' servers.
    RemoraModule,
    /// ... by TCP, replicas that feed each other, with our module in the primary and in the replicas' servers.
    RemoraModuleRelay,
    /// ... and the source leaves the cable some room, by its `--upload-limit`.
    RemoraModuleRelayGentle,
    /// One that joins the snapshot which [`Method::RemoraShm`] has left at the source.
    RemoraLate,
}

/// A line of configuration: name and value.
pub type Setting = (&'static str, String);

impl Method {
    /// What it is called in tables.
    pub fn name(self) -> &'static str {
        match self {
            Method::OwnDefault => "own, defaults",
            Method::OwnBest => "own, best",
            Method::OwnTogether => "own, best, together",
            Method::OwnDual => "own, best, dual channel",
            Method::Copier => "GET/SET copier",
            Method::CopierOneByOne => "GET/SET copier, one by one",
            Method::RemoraDefault => "Remora, defaults",
            Method::RemoraShm => "Remora shm, best",
            Method::RemoraTcp => "Remora tcp, best",
            Method::RemoraRelay => "Remora tcp, relay",
            Method::RemoraRelayGentle => "Remora tcp, relay, upload limited",
            Method::RemoraRelayKilled => "Remora tcp, relay, one killed",
            Method::RemoraModule => "Remora shm, module",
            Method::RemoraModuleRelay => "Remora tcp, relay, module",
            Method::RemoraModuleRelayGentle => "Remora tcp, relay, module, upload limited",
            Method::RemoraLate => "Remora shm, late joiner",
        }
    }

    /// Whether Remora does it.
    pub fn is_ours(self) -> bool {
        self.transport().is_some()
    }

    /// Whether the servers do it by themselves.
    pub fn is_own(self) -> bool {
        matches!(self, Method::OwnDefault | Method::OwnBest | Method::OwnTogether | Method::OwnDual)
    }

    /// Whether the servers have our module. For every other method they are without it.
    pub fn has_module(self) -> bool {
        matches!(self, Method::RemoraModule | Method::RemoraModuleRelay | Method::RemoraModuleRelayGentle)
    }

    /// What `remora replica` is told to read by.
    pub fn transport(self) -> Option<&'static str> {
        match self {
            Method::RemoraDefault => Some("auto"),
            Method::RemoraShm | Method::RemoraLate | Method::RemoraModule => Some("shm"),
            Method::RemoraTcp | Method::RemoraModuleRelay | Method::RemoraModuleRelayGentle => Some("tcp"),
            Method::RemoraRelay | Method::RemoraRelayGentle | Method::RemoraRelayKilled => Some("tcp"),
            Method::OwnDefault | Method::OwnBest | Method::OwnTogether | Method::OwnDual => None,
            Method::Copier | Method::CopierOneByOne => None,
        }
    }

    /// Whether replicas are to feed each other, where the program can be told.
    pub fn serves_peers(self) -> Option<bool> {
        match self {
            Method::RemoraTcp => Some(false),
            Method::RemoraRelay | Method::RemoraRelayGentle | Method::RemoraRelayKilled => Some(true),
            Method::RemoraModuleRelay | Method::RemoraModuleRelayGentle => Some(true),
            _ => None,
        }
    }

    /// What the source may send, in bytes per second, where a cable carries so many with all headers.
    pub fn upload_limit(self, cable: Option<u64>) -> Option<u64> {
        let is_gentle = matches!(self, Method::RemoraRelayGentle | Method::RemoraModuleRelayGentle);
        cable.filter(|_| is_gentle).map(|cable| cable / 100 * GENTLE_PERCENT)
    }

    /// Whether it reads memory across hosts, or needs no memory at all.
    pub fn crosses_hosts(self) -> bool {
        matches!(self.transport(), None | Some("tcp"))
    }

    /// Whether it says anything new for so many replicas of that kind.
    pub fn applies(self, kind: Kind, replicas: usize) -> bool {
        match self {
            Method::OwnDual => kind == Kind::Valkey9,
            Method::OwnTogether => replicas > 1,
            // The one, one that reads from it, and one for it to go to.
            Method::RemoraRelayKilled => replicas > 2,
            Method::RemoraLate => replicas == 1,
            _ => true,
        }
    }

    /// What the primary is set to.
    pub fn primary_settings(self, kind: Kind, replicas: usize) -> Vec<Setting> {
        let as_it_comes = [Method::OwnDefault, Method::RemoraDefault, Method::Copier, Method::CopierOneByOne];
        if as_it_comes.contains(&self) {
            return Vec::new();
        }
        // The server begins as soon as that many wait, and looks once a second; the delay is only how long it would wait at most.
        let together = matches!(self, Method::OwnTogether | Method::OwnDual) && replicas > 1;
        let delay = if together { TOGETHER_SECONDS } else { "0" };
        let mut settings = vec![
            ("repl-diskless-sync", "yes".to_owned()),
            ("repl-diskless-sync-delay", delay.to_owned()),
            ("rdbcompression", "no".to_owned()),
        ];
        if together {
            settings.push(("repl-diskless-sync-max-replicas", replicas.to_string()));
        }
        settings.extend(self.primary_dual(kind));
        settings
    }

    /// What the replicas' servers are started with. Remora's stay as they come.
    pub fn replica_settings(self, kind: Kind) -> Vec<Setting> {
        let mut settings = Vec::new();
        if self.is_own() && self != Method::OwnDefault {
            settings.push(("repl-diskless-load", "on-empty-db".to_owned()));
        }
        settings.extend(self.dual(kind));
        settings
    }

    /// Whether the replica's server loads while the bytes arrive, so that transfer and load are one.
    pub(crate) fn loads_while_receiving(self) -> bool {
        self != Method::OwnDefault
    }

    /// Remora asks for two channels where the primary has them switched on; its replicas' servers need nothing.
    fn primary_dual(self, kind: Kind) -> Option<Setting> {
        if self.is_ours() { Method::OwnDual.dual(kind) } else { self.dual(kind) }
    }

    fn dual(self, kind: Kind) -> Option<Setting> {
        (self == Method::OwnDual && kind == Kind::Valkey9)
            .then(|| ("dual-channel-replication-enabled", "yes".to_owned()))
    }
}

/// Of a cable's rate. TCP's payload is 95 % of it with packets of 1500 bytes; what is left is for everybody else.
const GENTLE_PERCENT: u64 = 90;

/// Longer than it takes to tell all replicas.
const TOGETHER_SECONDS: &str = "5";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_rival_is_given_worse_settings_than_ours() {
        let ours = Method::RemoraShm.primary_settings(Kind::Valkey9, 1);
        let theirs = Method::OwnDual.primary_settings(Kind::Valkey9, 1);
        assert!(ours.iter().all(|setting| theirs.contains(setting)), "{theirs:?}");
        let (ours, theirs) = (Method::RemoraShm, Method::OwnBest);
        assert_eq!(ours.primary_settings(Kind::Redis7, 1), theirs.primary_settings(Kind::Redis7, 1));
        assert!(Method::RemoraDefault.primary_settings(Kind::Redis7, 3).is_empty());
        assert!(Method::OwnDefault.replica_settings(Kind::Redis7).is_empty());
    }

    #[test]
    fn two_channels_are_a_matter_of_valkey_alone() {
        let dual = ("dual-channel-replication-enabled", "yes".to_owned());
        assert!(Method::OwnDual.primary_settings(Kind::Valkey9, 3).contains(&dual));
        assert!(Method::OwnDual.replica_settings(Kind::Valkey9).contains(&dual));
        assert!(!Method::OwnDual.applies(Kind::Redis7, 3));
    }
}
