//! Answers of a Sentinel, read without I/O. What is not as Sentinel documents it is an error, and never guessed.

use std::time::Duration;

use remora_redis::resp::Frame;

use crate::HostPort;

/// The longest host: that of a name in DNS.
const HOST_CHARS: usize = 253;

/// What Sentinel says about a primary and its group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// The time after which a Sentinel makes a replica that follows another server follow the primary again, and after
    /// which a fail-over is tried again.
    pub failover_timeout: Duration,
    /// How many other Sentinels this one knows.
    pub others: u64,
}

/// What Sentinel knows of a replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnownReplica {
    /// Where it is. `None` where Sentinel has no address that a server can have, such as port 0 of a source.
    pub address: Option<HostPort>,
    /// The server's run. Empty until Sentinel has asked the server.
    pub run_id: String,
    /// `slave`, and `s_down`, `disconnected`, …
    pub flags: String,
    /// Its `replica-priority`: of several replicas, one with the lowest is promoted, and none with 0.
    pub priority: u64,
}

/// Reads `SENTINEL GET-MASTER-ADDR-BY-NAME`. `None`: Sentinel does not know the name.
pub(super) fn address(answer: &Frame) -> Result<Option<HostPort>, String> {
    match answer {
        Frame::Null => Ok(None),
        Frame::Array(pair) => match pair.as_slice() {
            [host, port] => host_and_port(text(host)?, text(port)?).map(Some),
            _ => Err(format!("an array of {} elements is not an address", pair.len())),
        },
        other => Err(not_a("an address", other)),
    }
}

/// Reads the epoch of the configuration that a Sentinel has, out of `SENTINEL MASTER`. Each fail-over has a higher one.
pub(super) fn epoch(answer: &Frame) -> Result<Option<u64>, String> {
    Fields::of(answer)?.number("config-epoch").map(Some)
}

/// Reads `SENTINEL MASTER`.
pub(super) fn group(answer: &Frame) -> Result<Option<Group>, String> {
    let fields = Fields::of(answer)?;
    Ok(Some(Group {
        failover_timeout: Duration::from_millis(fields.number("failover-timeout")?),
        others: fields.number("num-other-sentinels")?,
    }))
}

/// Reads `SENTINEL REPLICAS`.
pub(super) fn replicas(answer: &Frame) -> Result<Option<Vec<KnownReplica>>, String> {
    let Frame::Array(list) = answer else { return Err(not_a("a list of replicas", answer)) };
    let replica = |entry| {
        let fields = Fields::of(entry)?;
        let address = host_and_port(fields.get("ip")?, fields.get("port")?).ok();
        let priority = fields.number("slave-priority")?;
        Ok(KnownReplica {
            address,
            run_id: fields.get("runid")?.to_owned(),
            flags: fields.get("flags")?.to_owned(),
            priority,
        })
    };
    list.iter().map(replica).collect::<Result<_, String>>().map(Some)
}

/// Names and values in turn.
struct Fields<'a>(Vec<(&'a str, &'a str)>);

impl<'a> Fields<'a> {
    fn of(answer: &'a Frame) -> Result<Fields<'a>, String> {
        let Frame::Array(items) = answer else { return Err(not_a("a list of fields", answer)) };
        let pair = |pair: &'a [Frame]| match pair {
            [name, value] => Ok((text(name)?, text(value)?)),
            _ => Err("a field has no value".to_owned()),
        };
        items.chunks(2).map(pair).collect::<Result<_, String>>().map(Fields)
    }

    fn get(&self, name: &str) -> Result<&'a str, String> {
        let field = self.0.iter().find(|(field, _)| *field == name);
        field.map(|(_, value)| *value).ok_or_else(|| format!("there is no field {name}"))
    }

    fn number(&self, name: &str) -> Result<u64, String> {
        let value = self.get(name)?;
        value.parse().map_err(|_| format!("the field {name} is not a number: {value:?}"))
    }
}

fn text(frame: &Frame) -> Result<&str, String> {
    match frame {
        Frame::Bulk(bytes) | Frame::Simple(bytes) => {
            std::str::from_utf8(bytes).map_err(|_| "a text is not UTF-8".to_owned())
        }
        other => Err(not_a("a text", other)),
    }
}

/// Checks an address, and keeps its host as it is.
fn host_and_port(host: &str, port: &str) -> Result<HostPort, String> {
    let wrong = || format!("{host:?}, port {port:?}, is not the address of a server");
    if host.len() > HOST_CHARS {
        return Err(format!("a host of {} characters", host.len()));
    }
    let shown = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
    let read: HostPort = shown.parse().map_err(|_| wrong())?;
    if read.host == host { Ok(read) } else { Err(wrong()) }
}

fn not_a(what: &str, frame: &Frame) -> String {
    let found = match frame {
        Frame::Simple(_) | Frame::Bulk(_) => "a text",
        Frame::Error(_) => "an error",
        Frame::Integer(_) => "a number",
        Frame::Null => "a null reply",
        Frame::Array(_) => "a list",
    };
    format!("{found} is not {what}")
}

/// What a Sentinel says about the primary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Told {
    pub(super) address: HostPort,
    /// The epoch of its configuration. `None` where the user may not ask for it.
    pub(super) epoch: Option<u64>,
}

/// The address in the latest configuration, and the place in the list of the Sentinel that has named it: of several
/// with the same configuration, the first in the list.
///
/// A Sentinel that was cut off, or has just started, names the primary of before a fail-over until another Sentinel
/// tells it. Each fail-over has a higher configuration epoch than the one before, and a majority of the Sentinels
/// agrees on it: the Sentinels themselves follow the highest that they hear of.
pub(super) fn latest(told: &[(usize, Told)]) -> Option<(usize, HostPort)> {
    let (at, latest) = told.iter().max_by_key(|(at, told)| (told.epoch, std::cmp::Reverse(*at)))?;
    let late = told.iter().filter(|(_, told)| told.address != latest.address).count();
    if late > 0 {
        tracing::info!(primary = %latest.address, late, "the Sentinels disagree; the latest configuration counts");
    }
    Some((*at, latest.address.clone()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;
    use remora_redis::resp::{Decoder, Limits};

    use super::*;

    fn bulk(text: &str) -> Frame {
        Frame::Bulk(text.as_bytes().to_vec())
    }

    fn list(words: &[&str]) -> Frame {
        Frame::Array(words.iter().map(|word| bulk(word)).collect())
    }

    #[test]
    fn an_address_stays_as_sentinel_writes_it() {
        for host in ["10.0.0.1", "fd00::1", "FD00:0::1", "db-1.example.net", "DB1"] {
            let read = address(&list(&[host, "6379"])).unwrap().unwrap();
            assert_eq!((read.host.as_str(), read.port), (host, 6379));
        }
        assert_eq!(address(&Frame::Null), Ok(None));
    }

    #[test]
    fn what_is_not_an_address_is_an_error() {
        let long = "a".repeat(300);
        for (host, port) in [
            ("", "6379"),
            ("10.0.0.1", "0"),
            ("10.0.0.1", "65536"),
            ("10.0.0.1", "+1"),
            ("a b", "1"),
            ("a\r\nREPLICAOF", "1"),
            ("[::1]", "1"),
            ("user@db1", "1"),
            ("::1/0", "1"),
            (long.as_str(), "1"),
        ] {
            assert!(address(&list(&[host, port])).is_err(), "{host} {port}");
        }
        for other in [list(&["h"]), list(&["h", "1", "2"]), Frame::Integer(1), bulk("h:1"), Frame::Array(vec![])] {
            assert!(address(&other).is_err(), "{other:?}");
        }
        assert!(address(&Frame::Array(vec![Frame::Bulk(vec![0xff]), bulk("1")])).is_err());
    }

    #[test]
    fn a_group_and_its_replicas_are_read_by_the_names_of_their_fields() {
        let fields = ["name", "m", "flags", "master,s_down", "config-epoch", "7", "num-other-sentinels", "2"];
        let read = group(&list(&[&fields[..], &["failover-timeout", "180000"]].concat())).unwrap().unwrap();
        assert_eq!(read.failover_timeout, Duration::from_secs(180));
        assert_eq!(read.others, 2);
        assert_eq!(epoch(&list(&fields)), Ok(Some(7)));
        assert!(epoch(&list(&["config-epoch", "-1"])).is_err() && epoch(&list(&fields[..4])).is_err());
        assert!(group(&list(&fields)).unwrap_err().contains("failover-timeout"));
        assert!(group(&list(&["flags"])).is_err() && group(&Frame::Null).is_err());

        let priority = ["slave-priority", "7"];
        let one =
            list(&[&["ip", "10.0.0.2", "port", "6380", "runid", "abc", "flags", "slave"][..], &priority].concat());
        let source = ["ip", "10.0.0.3", "port", "0", "runid", "", "flags", "s_down,slave,disconnected"];
        let source = list(&[&source[..], &priority].concat());
        let read = replicas(&Frame::Array(vec![one, source])).unwrap().unwrap();
        assert_eq!(read[0].address.as_ref().unwrap().to_string(), "10.0.0.2:6380");
        assert_eq!((read[0].run_id.as_str(), read[0].flags.as_str(), read[0].priority), ("abc", "slave", 7));
        assert!(read[1].address.is_none());
    }

    fn told(at: usize, port: u16, epoch: Option<u64>) -> (usize, Told) {
        let address = format!("10.0.0.1:{port}").parse().unwrap();
        (at, Told { address, epoch })
    }

    #[test]
    fn the_highest_epoch_wins_wherever_it_stands_and_whatever_comes_first() {
        let (old, new, unsure) = (told(0, 1, Some(9)), told(1, 2, Some(10)), told(2, 3, None));
        for list in [[&old, &new, &unsure], [&unsure, &new, &old], [&new, &unsure, &old]] {
            let list: Vec<_> = list.into_iter().cloned().collect();
            assert_eq!(latest(&list).unwrap().0, 1);
            assert_eq!(latest(&list).unwrap().1.port, 2);
        }
        // Epochs are numbers: the highest is not the one that a text would put last.
        assert_eq!(latest(&[told(0, 1, Some(99)), told(1, 2, Some(100))]).unwrap().0, 1);
    }

    #[test]
    fn of_equal_ones_the_first_in_the_list_counts_and_one_without_an_epoch_last() {
        assert_eq!(latest(&[told(2, 3, Some(4)), told(1, 2, Some(4))]).unwrap().0, 1);
        assert_eq!(latest(&[told(0, 1, None), told(1, 2, Some(0))]).unwrap().0, 1);
        assert_eq!(latest(&[told(1, 2, None), told(0, 1, None)]).unwrap().0, 0);
        assert_eq!(latest(&[]), None);
    }

    proptest! {
        #[test]
        fn no_answer_makes_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut decoder = Decoder::new(Limits::default());
            decoder.feed(&bytes);
            while let Ok(Some(frame)) = decoder.next_frame() {
                let _ = (address(&frame), group(&frame), epoch(&frame), replicas(&frame));
            }
        }

        #[test]
        fn no_field_makes_it_panic(words in proptest::collection::vec("(flags|ip|port|runid|config-epoch|[a-z0-9]{0,5})", 0..12)) {
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            let _ = (address(&list(&words)), group(&list(&words)), replicas(&Frame::Array(vec![list(&words)])));
        }
    }
}
