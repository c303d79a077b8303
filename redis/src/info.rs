//! The answer to `INFO` as a map; the names of replication histories; and small parsers that several modules need.
//!
//! Section names are dropped: no field name occurs in two sections.
//!
//! Parsing never fails. A line that is not `name:value` is skipped, and a caller that needs a field finds it missing.
//! The map is as large as the text, whose size [`crate::resp::Limits::bulk_bytes`] bounds.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use crate::MAX_OFFSET;

/// The fields of an `INFO` answer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Info {
    fields: BTreeMap<String, String>,
    modules: Vec<String>,
}

/// One `slaveN:` line of a primary: an attached replica.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Replica {
    /// Address, as the primary sees it or as the replica announced it.
    pub ip: String,
    /// Port that the replica says it listens on; 0 if it did not say.
    pub port: u16,
    /// `online`, `wait_bgsave`, `send_bulk`, or a state that later versions add.
    pub state: String,
    /// The offset that the replica acknowledged last.
    pub offset: u64,
    /// Seconds since that acknowledgement; `None` if the line does not contain it.
    pub lag: Option<u64>,
}

impl Info {
    /// Parses the text. If a name occurs twice, the last value counts; `module` lines are all kept.
    pub fn parse(text: &[u8]) -> Info {
        let fields: Vec<(String, String)> = text
            .split(|byte| *byte == b'\n')
            .map(|line| line.strip_suffix(b"\r").unwrap_or(line))
            .filter(|line| !line.starts_with(b"#"))
            .filter_map(|line| {
                let colon = line.iter().position(|byte| *byte == b':')?;
                let (name, value) = line.split_at_checked(colon)?;
                let value = value.strip_prefix(b":")?;
                Some((String::from_utf8_lossy(name).into_owned(), String::from_utf8_lossy(value).into_owned()))
            })
            .collect();
        let modules = fields.iter().filter(|(name, _)| name == "module").filter_map(|(_, line)| module_name(line));
        let modules = modules.map(str::to_owned).collect();
        Info { fields: fields.into_iter().collect(), modules }
    }

    /// The value of a field.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.fields.get(name).map(String::as_str)
    }

    /// The value of a field as a number; `None` if the field is missing or does not fit the type.
    pub fn number<T: FromStr>(&self, name: &str) -> Option<T> {
        self.get(name)?.trim().parse().ok()
    }

    /// All fields, sorted by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.fields.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// The names of the modules that the server has loaded, in its order. There is a line named `module` for each.
    pub fn modules(&self) -> &[String] {
        &self.modules
    }

    /// The replicas attached to this server, ordered by the names of their fields.
    pub fn replicas(&self) -> impl Iterator<Item = Replica> + '_ {
        self.fields.iter().filter(|(name, _)| is_replica(name)).filter_map(|(_, line)| Replica::parse(line))
    }
}

/// The name in `name=search,ver=20811,api=1,...`.
fn module_name(line: &str) -> Option<&str> {
    line.split(',').find_map(|pair| pair.strip_prefix("name="))
}

impl Replica {
    /// Parses `ip=127.0.0.1,port=6380,state=online,offset=14,lag=0`; pairs that later versions add are ignored.
    fn parse(line: &str) -> Option<Replica> {
        let field = |wanted: &str| {
            line.split(',')
                .filter_map(|pair| pair.split_once('='))
                .find_map(|(name, value)| (name == wanted).then_some(value))
        };
        Some(Replica {
            ip: field("ip")?.to_owned(),
            port: field("port")?.parse().ok()?,
            state: field("state")?.to_owned(),
            offset: field("offset")?.parse().ok()?,
            lag: field("lag").and_then(|lag| lag.parse().ok()),
        })
    }
}

/// Matches `slave0` and `slave17`, but not `slave_repl_offset`.
fn is_replica(name: &str) -> bool {
    name.strip_prefix("slave")
        .is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

// The name of a replication history.

/// Number of hexadecimal digits in the name of a history (`CONFIG_RUN_ID_SIZE` in the servers).
const DIGITS: usize = 40;

/// A replication id: 40 hexadecimal digits in lower case, as the servers print it.
///
/// A primary generates a new one when it begins a history that no replica can continue. Two servers with the same
/// replication id and the same offset hold the same data.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ReplId([u8; DIGITS]);

impl ReplId {
    /// Parses 40 hexadecimal digits; upper case is converted to lower case.
    pub fn parse(digits: &[u8]) -> Result<ReplId, InvalidReplId> {
        let digits: [u8; DIGITS] = digits.try_into().map_err(|_| InvalidReplId { length: digits.len() })?;
        if !digits.iter().all(u8::is_ascii_hexdigit) {
            return Err(InvalidReplId { length: DIGITS });
        }
        Ok(ReplId(digits.map(|digit| digit.to_ascii_lowercase())))
    }

    /// The 40 digits, in lower case.
    pub fn as_bytes(&self) -> &[u8; DIGITS] {
        &self.0
    }
}

/// The exact form of binary formats: 40 digits in lower case. What is converted has the same bytes again.
impl TryFrom<[u8; DIGITS]> for ReplId {
    type Error = InvalidReplId;

    fn try_from(digits: [u8; DIGITS]) -> Result<ReplId, InvalidReplId> {
        ReplId::parse(&digits).ok().filter(|replid| replid.0 == digits).ok_or(InvalidReplId { length: DIGITS })
    }
}

impl FromStr for ReplId {
    type Err = InvalidReplId;

    fn from_str(text: &str) -> Result<ReplId, InvalidReplId> {
        ReplId::parse(text.as_bytes())
    }
}

impl fmt::Display for ReplId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|digit| fmt::Write::write_char(f, char::from(*digit)))
    }
}

impl fmt::Debug for ReplId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ReplId({self})")
    }
}

/// The parsed text is not a replication id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a replid has {DIGITS} hexadecimal digits; this has {length} bytes or other characters")]
pub struct InvalidReplId {
    /// Length of the text, in bytes.
    pub length: usize,
}

// Small parsers that several modules need: decimal numbers, and excerpts for error messages. Not a parser library:
// each function parses one line of some protocol.

/// Bytes of a peer's data that an error message quotes: enough to recognise an HTTP status line, short enough for a
/// log.
const EXCERPT_BYTES: usize = 60;

/// A whole number as servers print it: digits only, no sign, no space.
pub(crate) fn decimal_u64(digits: &[u8]) -> Option<u64> {
    let all_digits = !digits.is_empty() && digits.iter().all(u8::is_ascii_digit);
    all_digits.then(|| std::str::from_utf8(digits).ok()?.parse().ok()).flatten()
}

/// A replication offset, at most [`MAX_OFFSET`].
pub(crate) fn offset(digits: &[u8]) -> Option<u64> {
    decimal_u64(digits).filter(|offset| *offset <= MAX_OFFSET)
}

/// As [`decimal_u64`], with an optional minus sign.
pub(crate) fn decimal_i64(digits: &[u8]) -> Option<i64> {
    let unsigned = digits.strip_prefix(b"-").unwrap_or(digits);
    let all_digits = !unsigned.is_empty() && unsigned.iter().all(u8::is_ascii_digit);
    all_digits.then(|| std::str::from_utf8(digits).ok()?.parse().ok()).flatten()
}

/// The beginning of `bytes` as printable text, at most [`EXCERPT_BYTES`] of them.
pub(crate) fn excerpt(bytes: &[u8]) -> String {
    let head = bytes.get(..EXCERPT_BYTES).unwrap_or(bytes);
    let ellipsis = if head.len() < bytes.len() { "…" } else { "" };
    format!("{}{ellipsis}", head.escape_ascii())
}

/// `text` without line breaks, which would end a RESP line early.
pub(crate) fn one_line(text: &[u8]) -> impl Iterator<Item = u8> + '_ {
    text.iter().map(|byte| match byte {
        b'\r' | b'\n' => b' ',
        other => *other,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const PRIMARY: &[u8] = include_bytes!("../tests/corpus/info/valkey-9.1-primary");

    #[test]
    fn a_primary_tells_its_role_offset_and_replicas() {
        let info = Info::parse(PRIMARY);
        assert_eq!(info.get("role"), Some("master"));
        assert_eq!(info.number::<u16>("connected_slaves"), Some(1));
        assert!(info.get("master_replid").unwrap().parse::<crate::ReplId>().is_ok());
        let replicas: Vec<Replica> = info.replicas().collect();
        assert_eq!(replicas.len(), 1);
        assert_eq!(replicas[0].ip, "127.0.0.1");
        assert_eq!(replicas[0].state, "online");
        assert_eq!(Some(replicas[0].offset), info.number("master_repl_offset"));
    }

    #[test]
    fn names_that_only_begin_like_a_replica_are_none() {
        let info = Info::parse(b"slave_repl_offset:17\r\nslave:x\r\nslave1x:ip=a\r\nslaves:3\r\n");
        assert_eq!(info.replicas().count(), 0);
        assert_eq!(info.number::<u64>("slave_repl_offset"), Some(17));
    }

    #[test]
    fn an_address_of_ip_version_6_keeps_its_colons() {
        let info = Info::parse(b"slave0:ip=fe80::1,port=0,state=wait_bgsave,offset=0,lag=-1,type=replica\r\n");
        let replica = info.replicas().next().unwrap();
        assert_eq!((replica.ip.as_str(), replica.port, replica.lag), ("fe80::1", 0, None));
    }

    #[test]
    fn a_replid_prints_as_it_was_read() {
        let text = "8c1c6b2f0d6a4e7b9a0f1e2d3c4b5a6978695a4b";
        assert_eq!(text.parse::<ReplId>().unwrap().to_string(), text);
        assert_eq!(text.to_uppercase().parse::<ReplId>().unwrap().to_string(), text);
    }

    #[test]
    fn anything_but_forty_hexadecimal_digits_is_refused() {
        for wrong in ["", "?", &"a".repeat(39), &"a".repeat(41), &"g".repeat(40)] {
            assert!(wrong.parse::<ReplId>().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn bytes_are_converted_only_if_they_come_back_the_same() {
        let digits = *b"8c1c6b2f0d6a4e7b9a0f1e2d3c4b5a6978695a4b";
        assert_eq!(ReplId::try_from(digits).unwrap().as_bytes(), &digits);
        for wrong in [digits.map(|digit| digit.to_ascii_uppercase()), [0; 40], [b'g'; 40]] {
            assert!(ReplId::try_from(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn numbers_are_digits_and_nothing_else() {
        assert_eq!(decimal_u64(b"18446744073709551615"), Some(u64::MAX));
        assert_eq!(decimal_i64(b"-9223372036854775808"), Some(i64::MIN));
        for wrong in [&b""[..], b"+1", b" 1", b"1 ", b"-1", b"0x1", b"18446744073709551616"] {
            assert_eq!(decimal_u64(wrong), None, "{wrong:?}");
        }
        for wrong in [&b""[..], b"-", b"--1", b"+1", b"9223372036854775808"] {
            assert_eq!(decimal_i64(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn an_excerpt_is_printable_and_short() {
        assert_eq!(excerpt(b"\x15\x03\x01ok"), "\\x15\\x03\\x01ok");
        assert_eq!(excerpt(&[b'a'; 1000]), format!("{}…", "a".repeat(EXCERPT_BYTES)));
    }
}
