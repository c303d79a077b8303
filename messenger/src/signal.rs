//! The meaning of frames: the heads of all tags, as fixed records. Pure.
//!
//! | tag | head | sent by, and when |
//! |---|---|---|
//! | 1 `OPEN` | who this end is, both cookies, attempt, last message received | the connecting end, first |
//! | 2 `OPENED` | the same for the other end | the answer that makes both ends ready |
//! | 3 `RETRY` | attempt | your attempt is older than one that this end knows: continue from this one |
//! | 4 `RESET` | – | this end does not know the session that you want to resume |
//! | 5 `WAIT` | – | both ends have connected, and the sender's connection wins: wait for it |
//! | 6 `REFUSED` | reason | no; do not repeat the same request |
//! | 16 `MESSAGE` | number, acknowledgement, transaction, kind | at any time when ready; front, middle and data are the owner's |
//! | 17 `ACK` | acknowledgement | when no message has carried it for a while |
//! | 18 `PING`, 19 `PONG` | – | after a silence; the answer |
//! | 20 `CLOSE` | – | the sender has sent everything |

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use crate::frame::{HEAD_BYTES, Malformed};

/// The identity of an end: one messenger, for as long as it exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Entity(pub u64);

/// Identifies a session at one end, and counts how often it was reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Cookie {
    /// Random, unique at its end, and the same for as long as the owner keeps the connection. Never 0.
    pub id: u64,
    /// Counts the resets: a session that was forgotten is a different session.
    pub epoch: u32,
}

/// What each end says about itself when a link begins to serve a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Open {
    /// The sender.
    pub entity: Entity,
    /// Where the sender can be connected to, if it listens.
    pub address: Option<SocketAddr>,
    /// The sender's session.
    pub from: Cookie,
    /// The receiver's session that the sender means; `None` if it knows of none.
    pub to: Option<Cookie>,
    /// Counts the links that either end has made for this session.
    pub attempt: u64,
    /// Number of the last message that the sender has received.
    pub heard: u64,
    /// The sender's end is lossy: it replays nothing and expects no replay.
    pub lossy: bool,
}

/// A frame of the session itself, without bodies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    /// Names the session that a link is for.
    Open(Open),
    /// Accepts the session.
    Opened(Open),
    /// The attempt is older than one that the sender knows.
    Retry {
        /// The highest attempt known.
        attempt: u64,
    },
    /// The sender does not know the session.
    Reset,
    /// The sender's own connect wins.
    Wait,
    /// The sender refuses the session.
    Refused(Refusal),
    /// Acknowledges messages.
    Ack {
        /// Number of the last message received.
        heard: u64,
    },
    /// Asks for a PONG.
    Ping,
    /// Answers a PING.
    Pong,
    /// The sender has sent everything.
    Close,
}

/// Why an end refuses a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// It accepts no sessions: it only connects, or it is stopping.
    #[error("it accepts no connections")]
    NotServing,
    /// It holds as many sessions as its limit allows.
    #[error("it has as many sessions as it allows: try again later, or raise its limit")]
    Full,
    /// One end replays messages and the other does not.
    #[error("one end is lossy and the other is not: give both ends policies that fit together")]
    Policy,
    /// It has connected to itself.
    #[error("it is this messenger itself: connect to another address")]
    Oneself,
}

/// The head of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Label {
    /// Counted from 1, per direction of a session.
    pub number: u64,
    /// Number of the last message received in the other direction.
    pub heard: u64,
    /// The request that this answers, or any other number that the owner chooses.
    pub transaction: u64,
    /// The kind of message, chosen by the owner.
    pub kind: u16,
}

/// The tag of messages. Every other tag is a [`Signal`].
pub const MESSAGE: u8 = 16;

impl Label {
    /// Encodes the head.
    pub fn encode(&self) -> [u8; LABEL_BYTES] {
        let mut head = [0; LABEL_BYTES];
        head[..8].copy_from_slice(&self.number.to_le_bytes());
        head[8..16].copy_from_slice(&self.heard.to_le_bytes());
        head[16..24].copy_from_slice(&self.transaction.to_le_bytes());
        head[24..26].copy_from_slice(&self.kind.to_le_bytes());
        head
    }

    /// Decodes a head.
    ///
    /// # Errors
    /// [`Malformed::Content`].
    pub fn decode(head: &[u8]) -> Result<Label, Malformed> {
        let mut fields = Fields { rest: head, tag: MESSAGE };
        let label =
            Label { number: fields.u64()?, heard: fields.u64()?, transaction: fields.u64()?, kind: fields.u16()? };
        fields.reserved::<2>()?;
        fields.end().map(|()| label)
    }
}

impl Signal {
    /// Encodes the tag, and the head with its length.
    pub fn encode(&self) -> (u8, [u8; HEAD_BYTES], usize) {
        let mut head = [0; HEAD_BYTES];
        let (tag, length) = match self {
            Signal::Open(open) => (OPEN, open.put(&mut head)),
            Signal::Opened(open) => (OPENED, open.put(&mut head)),
            Signal::Retry { attempt: number } => (RETRY, put(&mut head, 0, &number.to_le_bytes())),
            Signal::Ack { heard: number } => (ACK, put(&mut head, 0, &number.to_le_bytes())),
            Signal::Refused(refusal) => (REFUSED, put(&mut head, 0, &[refusal.code()])),
            Signal::Reset => (RESET, 0),
            Signal::Wait => (WAIT, 0),
            Signal::Ping => (PING, 0),
            Signal::Pong => (PONG, 0),
            Signal::Close => (CLOSE, 0),
        };
        (tag, head, length)
    }

    /// Decodes a head.
    ///
    /// # Errors
    /// [`Malformed::Content`]: there is no such tag, or the head is not one of that tag.
    pub fn decode(tag: u8, head: &[u8]) -> Result<Signal, Malformed> {
        let mut fields = Fields { rest: head, tag };
        let signal = match tag {
            OPEN => Signal::Open(Open::take(&mut fields)?),
            OPENED => Signal::Opened(Open::take(&mut fields)?),
            RETRY => Signal::Retry { attempt: fields.u64()? },
            ACK => Signal::Ack { heard: fields.u64()? },
            REFUSED => Signal::Refused(Refusal::of(fields.u8()?).ok_or(Malformed::Content { tag })?),
            RESET => Signal::Reset,
            WAIT => Signal::Wait,
            PING => Signal::Ping,
            PONG => Signal::Pong,
            CLOSE => Signal::Close,
            _ => return Err(Malformed::Content { tag }),
        };
        fields.end().map(|()| signal)
    }
}

impl Open {
    /// Fixed positions: entity, from, to, attempt, heard, address (IPv4 mapped into IPv6), port (0 for none), lossy: 67
    /// bytes.
    fn put(&self, head: &mut [u8; HEAD_BYTES]) -> usize {
        let to = self.to.unwrap_or(Cookie { id: 0, epoch: 0 });
        let (ip, port) = match self.address {
            Some(address) => (to_v6(address.ip()), address.port()),
            None => (Ipv6Addr::UNSPECIFIED, 0),
        };
        let mut at = put(head, 0, &self.entity.0.to_le_bytes());
        at = put(head, at, &self.from.id.to_le_bytes());
        at = put(head, at, &self.from.epoch.to_le_bytes());
        at = put(head, at, &to.id.to_le_bytes());
        at = put(head, at, &to.epoch.to_le_bytes());
        at = put(head, at, &self.attempt.to_le_bytes());
        at = put(head, at, &self.heard.to_le_bytes());
        at = put(head, at, &ip.octets());
        at = put(head, at, &port.to_le_bytes());
        put(head, at, &[u8::from(self.lossy)])
    }

    fn take(fields: &mut Fields<'_>) -> Result<Open, Malformed> {
        let malformed = Malformed::Content { tag: fields.tag };
        let entity = Entity(fields.u64()?);
        let from = Cookie { id: fields.u64()?, epoch: fields.u32()? };
        let to = Cookie { id: fields.u64()?, epoch: fields.u32()? };
        let (attempt, heard) = (fields.u64()?, fields.u64()?);
        let (ip, port) = (Ipv6Addr::from(fields.array::<16>()?), fields.u16()?);
        let lossy = match fields.u8()? {
            0 => false,
            1 => true,
            _ => return Err(malformed),
        };
        if from.id == 0 {
            return Err(malformed);
        }
        let address = (port != 0).then(|| SocketAddr::new(ip.to_canonical(), port));
        let to = (to.id != 0).then_some(to);
        Ok(Open { entity, address, from, to, attempt, heard, lossy })
    }
}

impl Refusal {
    fn code(self) -> u8 {
        match self {
            Refusal::NotServing => 1,
            Refusal::Full => 2,
            Refusal::Policy => 3,
            Refusal::Oneself => 4,
        }
    }

    fn of(code: u8) -> Option<Refusal> {
        [Refusal::NotServing, Refusal::Full, Refusal::Policy, Refusal::Oneself].into_iter().find(|it| it.code() == code)
    }
}

fn to_v6(ip: IpAddr) -> Ipv6Addr {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    }
}

/// Writes a field, and returns where the next one begins.
fn put(head: &mut [u8], at: usize, field: &[u8]) -> usize {
    head[at..at + field.len()].copy_from_slice(field);
    at + field.len()
}

/// The fields of a head that have not been read yet.
struct Fields<'a> {
    rest: &'a [u8],
    tag: u8,
}

impl Fields<'_> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (field, rest) = self.rest.split_first_chunk().ok_or(Malformed::Content { tag: self.tag })?;
        self.rest = rest;
        Ok(*field)
    }

    fn u8(&mut self) -> Result<u8, Malformed> {
        self.array().map(u8::from_le_bytes)
    }

    fn u16(&mut self) -> Result<u16, Malformed> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, Malformed> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, Malformed> {
        self.array().map(u64::from_le_bytes)
    }

    /// Checks bytes that must be zero until a later version uses them.
    fn reserved<const N: usize>(&mut self) -> Result<(), Malformed> {
        let zero = self.array::<N>()? == [0; N];
        zero.then_some(()).ok_or(Malformed::Content { tag: self.tag })
    }

    fn end(self) -> Result<(), Malformed> {
        self.rest.is_empty().then_some(()).ok_or(Malformed::Content { tag: self.tag })
    }
}

const OPEN: u8 = 1;
const OPENED: u8 = 2;
const RETRY: u8 = 3;
const RESET: u8 = 4;
const WAIT: u8 = 5;
const REFUSED: u8 = 6;
const ACK: u8 = 17;
const PING: u8 = 18;
const PONG: u8 = 19;
const CLOSE: u8 = 20;

/// Length of a message's head, in bytes.
pub const LABEL_BYTES: usize = 28;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use proptest::prelude::*;

    fn opens() -> impl Strategy<Value = Open> {
        let cookies = (1u64.., any::<u32>()).prop_map(|(id, epoch)| Cookie { id, epoch });
        let address = proptest::option::of((any::<IpAddr>(), 1u16..)).prop_map(|address| {
            let (ip, port) = address?;
            Some(SocketAddr::new(to_v6(ip).to_canonical(), port))
        });
        (any::<[u64; 3]>(), address, cookies.clone(), proptest::option::of(cookies), any::<bool>()).prop_map(
            |([entity, attempt, heard], address, from, to, lossy)| Open {
                entity: Entity(entity),
                address,
                from,
                to,
                attempt,
                heard,
                lossy,
            },
        )
    }

    fn signals() -> impl Strategy<Value = Signal> {
        prop_oneof![
            opens().prop_map(Signal::Open),
            opens().prop_map(Signal::Opened),
            any::<u64>().prop_map(|attempt| Signal::Retry { attempt }),
            any::<u64>().prop_map(|heard| Signal::Ack { heard }),
            (1u8..5).prop_map(|code| Signal::Refused(Refusal::of(code).unwrap())),
            prop::sample::select(vec![Signal::Reset, Signal::Wait, Signal::Ping, Signal::Pong, Signal::Close]),
        ]
    }

    proptest! {
        #[test]
        fn every_signal_arrives_as_it_was_sent_and_no_byte_may_be_missing(signal in signals()) {
            let (tag, head, length) = signal.encode();
            prop_assert_eq!(Signal::decode(tag, &head[..length]), Ok(signal));
            if length > 0 {
                prop_assert!(Signal::decode(tag, &head[..length - 1]).is_err());
            }
        }

        #[test]
        fn every_label_arrives_as_it_was_sent(number: u64, heard: u64, transaction: u64, kind: u16) {
            let label = Label { number, heard, transaction, kind };
            prop_assert_eq!(Label::decode(&label.encode()), Ok(label));
        }

        #[test]
        fn any_head_is_a_signal_or_an_error(tag: u8, head in proptest::collection::vec(any::<u8>(), 0..70)) {
            if let Ok(signal) = Signal::decode(tag, &head) {
                let (again, bytes, length) = signal.encode();
                prop_assert_eq!(again, tag);
                prop_assert_eq!(bytes[..length].len(), head.len());
            }
        }
    }
}
