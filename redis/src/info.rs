//! The answer to `INFO` as a map. Section names are dropped: no field name occurs in two sections.
//!
//! Parsing never fails. A line that is not `name:value` is skipped, and a caller that needs a field finds it missing.
//! The map is as large as the text, whose size [`crate::resp::Limits::bulk_bytes`] bounds.

use std::collections::BTreeMap;
use std::str::FromStr;

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
}
