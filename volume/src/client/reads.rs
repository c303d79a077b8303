//! Reads: the ways in which blocks are read, and their names.

use std::fmt;
use std::str::FromStr;

use remora_fabric::TransportKind;

/// How blocks are read. A read that a faster way does not answer is always asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reads {
    /// By asking a server.
    Asked,
    /// In the memory of a server that runs on this host, if one does.
    #[default]
    Here,
    /// Also in the memory of servers on other hosts, if they permit it: by RDMA, or over TCP. The blocks are neither
    /// encrypted nor authenticated on their way.
    Anywhere,
    /// Only so, for measurements: not in the memory of this host.
    Far,
}

/// A text that is not a [`Reads`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a way to read: use asked, here, anywhere or far")]
pub struct NotAWayToRead;

const WAYS: [(Reads, &str); 4] =
    [(Reads::Asked, "asked"), (Reads::Here, "here"), (Reads::Anywhere, "anywhere"), (Reads::Far, "far")];

impl Reads {
    /// The transports, nearest first.
    pub(crate) fn transports(self) -> &'static [TransportKind] {
        match self {
            Reads::Asked => &[],
            Reads::Here => &[TransportKind::Shm],
            Reads::Anywhere => &[TransportKind::Shm, TransportKind::Verbs, TransportKind::Tcp],
            Reads::Far => &[TransportKind::Verbs, TransportKind::Tcp],
        }
    }

    /// Whether blocks cross the network without encryption if a server is on another host.
    pub fn is_plain(self) -> bool {
        matches!(self, Reads::Anywhere | Reads::Far)
    }
}

impl FromStr for Reads {
    type Err = NotAWayToRead;

    fn from_str(text: &str) -> Result<Reads, NotAWayToRead> {
        WAYS.iter().find(|(_, name)| *name == text).map(|(way, _)| *way).ok_or(NotAWayToRead)
    }
}

impl fmt::Display for Reads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = WAYS.iter().find(|(way, _)| way == self).map_or("", |(_, name)| name);
        f.write_str(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_are_read_and_shown() {
        for (way, name) in WAYS {
            assert_eq!((name.parse(), way.to_string().as_str()), (Ok(way), name));
        }
        assert_eq!("Here".parse::<Reads>(), Err(NotAWayToRead));
    }
}
