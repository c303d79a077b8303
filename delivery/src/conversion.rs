//! Conversion: what a server of another family, or of an older version, is given (`--convert`).
//!
//! The snapshot is rewritten on its way to the server ([`remora_redis::rdb::Converter`]). Its stream cannot be: an
//! offset counts its bytes. So a command that the server does not know must not be in it: before the sync the primary's
//! own counters are asked, and while the agent feeds the stream each command is looked at before it is sent on.

use std::collections::BTreeSet;
use std::sync::Arc;

use remora_redis::aof::Known;
use remora_redis::commands::{self, Release};
use remora_redis::info::Info;
use remora_redis::rdb::{Converter, Format, Options};
use remora_redis::resp::Frame;

use remora_process::exit::{Code, Failure};
use remora_server::{Client, Facts, Family, ServerUrl, Version};

/// The first version of Redis, and all of Valkey, that list the names of their commands alone.
const LISTS_COMMANDS: Version = Version { major: 7, minor: 0, patch: 0 };

/// Names that a refusal shows.
const SHOWN_NAMES: usize = 8;

/// A command that servers of these families write into their stream as other ones.
struct Rewritten {
    name: &'static str,
    by: &'static [Family],
    /// The first version of Redis that does it; of Valkey, all do.
    since: (u32, u32),
    /// What the stream has in its place; a replica needs all of them.
    becomes: &'static [&'static str],
}

const ANY: (u32, u32) = (0, 0);

const BOTH: &[Family] = &[Family::Redis, Family::Valkey];

/// Measured with the servers that docs/how-to/migrate.md names.
const REWRITTEN: [Rewritten; 13] = [
    Rewritten { name: "lmpop", by: BOTH, since: ANY, becomes: &["lpop", "rpop"] },
    Rewritten { name: "blmpop", by: BOTH, since: ANY, becomes: &["lpop", "rpop"] },
    Rewritten { name: "zmpop", by: BOTH, since: ANY, becomes: &["zpopmin", "zpopmax"] },
    Rewritten { name: "bzmpop", by: BOTH, since: ANY, becomes: &["zpopmin", "zpopmax"] },
    Rewritten { name: "hexpire", by: BOTH, since: ANY, becomes: &["hpexpireat"] },
    Rewritten { name: "hpexpire", by: BOTH, since: ANY, becomes: &["hpexpireat"] },
    Rewritten { name: "hexpireat", by: BOTH, since: ANY, becomes: &["hpexpireat"] },
    Rewritten { name: "hgetex", by: BOTH, since: ANY, becomes: &["hpexpireat", "hpersist"] },
    // Valkey 9.1 writes it as it is.
    Rewritten { name: "hgetdel", by: &[Family::Redis], since: ANY, becomes: &["hdel"] },
    Rewritten { name: "hincrbyfloat", by: &[Family::Redis], since: (8, 0), becomes: &["hsetex"] },
    Rewritten { name: "getex", by: BOTH, since: ANY, becomes: &["pexpireat", "persist"] },
    Rewritten { name: "delifeq", by: &[Family::Valkey], since: ANY, becomes: &["del"] },
    Rewritten { name: "delex", by: &[Family::Redis], since: ANY, becomes: &["del"] },
];

/// What a conversion leaves out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeftOut {
    /// The times at which fields of hashes expire.
    FieldExpiry,
    /// Keys of modules' types.
    ModuleKeys,
    /// Libraries of functions.
    Functions,
}

impl LeftOut {
    /// The word on the command line, which refusals name.
    pub const fn word(self) -> &'static str {
        match self {
            Self::FieldExpiry => "field-expiry",
            Self::ModuleKeys => "module-keys",
            Self::Functions => "functions",
        }
    }
}

/// What is known of a server that a snapshot is converted for.
#[derive(Clone, Debug)]
pub struct Conversion {
    /// The format that it reads.
    format: Format,
    /// What is left out of the snapshot.
    left_out: Options,
    /// What it knows of the stream.
    pub known: Arc<Known>,
}

impl Conversion {
    /// Asks a server.
    ///
    /// # Errors
    /// It does not tell its version or its commands.
    pub async fn of(client: &mut Client, facts: &Facts, leave_out: &[LeftOut]) -> Result<Conversion, Failure> {
        let Some(version) = facts.version else {
            let url = client.server().url();
            return Err(Failure::refused(format!(
                "the server {url} does not tell its version (INFO server), so that no snapshot can be converted for it: \
                 omit --convert"
            )));
        };
        let (is_valkey, Version { major, minor, .. }) = (facts.family == Family::Valkey, version);
        let release = Release { family: if is_valkey { "Valkey" } else { "Redis" }, major, minor };
        let format = Format::of_server(is_valkey, (major, minor));
        let answer = match facts.has_redis(LISTS_COMMANDS) {
            true => client.command(&["COMMAND", "LIST"]).await?,
            false => client.command(&["COMMAND"]).await?,
        };
        let left_out = Options {
            drop_field_expiry: leave_out.contains(&LeftOut::FieldExpiry),
            skip_modules: leave_out.contains(&LeftOut::ModuleKeys),
            skip_functions: leave_out.contains(&LeftOut::Functions),
        };
        let Some(commands) = command_names(answer) else {
            let url = client.server().url();
            return Err(Failure::new(Code::Server, format!("the server {url} does not tell its commands (COMMAND)")));
        };
        Ok(Conversion { format, left_out, known: Arc::new(Known { commands, release }) })
    }

    /// A conversion of one snapshot.
    pub fn converter(&self) -> Converter {
        Converter::new(self.format, self.left_out)
    }

    /// Whether fields of hashes lose the time at which they expire.
    pub fn drops_field_expiry(&self) -> bool {
        self.left_out.drop_field_expiry
    }

    /// Refuses a primary that holds what the server cannot.
    pub fn check_contents(&self, primary: &Facts, server: &Facts, url: &ServerUrl) -> Result<(), Failure> {
        let holds_them = server.holds_field_ttls() || self.drops_field_expiry();
        check_field_ttls(primary, server, url, holds_them)
    }

    /// Refuses a primary that has run commands which the server does not know: they come again. `ran`: its `INFO
    /// commandstats`.
    pub fn check_commands(&self, ran: &Info, primary: &Facts, url: &ServerUrl) -> Result<(), Failure> {
        let unknown: Vec<&str> = self.unknown_of(ran, primary).collect();
        if unknown.is_empty() {
            return Ok(());
        }
        let more = unknown.len().saturating_sub(SHOWN_NAMES);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        let shown = unknown.iter().take(SHOWN_NAMES).map(|name| name.to_uppercase()).collect::<Vec<_>>().join(", ");
        Err(Failure::refused(format!(
            "the primary has run commands that the server {url} does not know, and which would fail there: {shown}{more} \
             (INFO commandstats). If no client sends them any more, reset the counters with CONFIG RESETSTAT"
        )))
    }

    fn unknown_of<'i>(&self, ran: &'i Info, primary: &Facts) -> impl Iterator<Item = &'i str> {
        let by = (primary.family, primary.version.map_or(ANY, |version| (version.major, version.minor)));
        let names = ran.iter().filter_map(|(field, _)| field.strip_prefix("cmdstat_"));
        names.filter(move |name| {
            // A command of a module is in no table, and can write.
            let writes = commands::find(name.as_bytes()).map_or(WRITES_OF_MODULES.contains(name), |known| known.writes);
            writes && !self.knows(name, by)
        })
    }

    /// Whether the server knows a command, or what the primary's stream has in its place.
    fn knows(&self, name: &str, (family, version): (Family, (u32, u32))) -> bool {
        let has = |name: &str| self.known.commands.contains(name.split('|').next().unwrap_or(name));
        let is_done = |rewritten: &&Rewritten| {
            let is_new_enough = family == Family::Valkey || version >= rewritten.since;
            rewritten.name == name && rewritten.by.contains(&family) && is_new_enough
        };
        let rewritten = REWRITTEN.iter().find(is_done);
        match rewritten {
            Some(rewritten) => rewritten.becomes.iter().all(|name| has(name)),
            None => has(name),
        }
    }
}

/// Refuses a server that cannot become a replica of this primary by a conversion, as far as the primary can tell.
///
/// # Errors
/// Why, or one of them does not answer.
pub async fn refuse(primary: &mut Client, server: &mut Client, left_out: &[LeftOut]) -> Result<(), Failure> {
    let (of_primary, of_server) = (Facts::read(primary).await?, Facts::read(server).await?);
    if of_primary.is_of_one_release_with(&of_server) {
        return Ok(());
    }
    let (url, at) = (server.server().url().clone(), primary.server().url().clone());
    let refused =
        |why: String| Err(Failure::refused(format!("{url} ({}) cannot follow {at}: {why}", of_server.name())));
    let missing: Vec<&str> = of_primary.modules_missing_at(&of_server);
    let missing: Vec<&str> = missing.into_iter().filter(|name| !WITH_REDIS.contains(name)).collect();
    if !missing.is_empty() && !left_out.contains(&LeftOut::ModuleKeys) {
        return refused(format!(
            "it lacks modules: {}; load them there, or have its agent leave their keys out (--leave-out module-keys)",
            missing.join(", ")
        ));
    }
    if of_primary.libraries.is_some_and(|count| count > 0)
        && !of_server.has_redis(LISTS_COMMANDS)
        && !left_out.contains(&LeftOut::Functions)
    {
        return refused("it knows no functions, and there are libraries of them (--leave-out functions)".into());
    }
    if let Some(highest) = of_primary.highest_database().filter(|highest| *highest > 0) {
        let has = server.config_get(DATABASES_OF_A_CLUSTER).await?.and_then(|count| count.parse::<u32>().ok());
        if has.is_none_or(|count| count <= highest) {
            return refused(format!("there are keys in database {highest} ({DATABASES_OF_A_CLUSTER})"));
        }
    }
    let conversion = Conversion::of(server, &of_server, left_out).await?;
    conversion.check_contents(&of_primary, &of_server, &url)?;
    conversion.check_commands(&primary.info("commandstats").await?, &of_primary, &url)
}

/// Refuses a server that cannot hold hashes whose fields expire, if the primary has any: the primary's snapshot for it
/// would fail, or its own load.
pub fn check_field_ttls(facts: &Facts, target: &Facts, url: &ServerUrl, holds_them: bool) -> Result<(), Failure> {
    let hashes = facts.databases.iter().map(|database| database.field_expires).fold(0, u64::saturating_add);
    if hashes == 0 || holds_them {
        return Ok(());
    }
    let plural = if hashes == 1 { "hash" } else { "hashes" };
    Err(Failure::refused(format!(
        "the server {url} ({}) cannot hold fields that expire, and the primary ({}) has {hashes} {plural} with such fields (INFO \
         keyspace): run a server there that is as new as the primary, of the same kind",
        target.name(),
        facts.name()
    )))
}

/// How many databases nodes of Valkey 9 have.
const DATABASES_OF_A_CLUSTER: &str = "cluster-databases";

/// Modules that are a part of Redis 8. Its commands that write say whether there are keys of them.
const WITH_REDIS: [&str; 1] = ["vectorset"];

/// Commands that write of the modules that are a part of Redis 8. Those of other modules come with a module that the
/// server lacks, whose keys are refused.
const WRITES_OF_MODULES: [&str; 3] = ["vadd", "vrem", "vsetattr"];

/// The names in an answer to `COMMAND LIST`, or to `COMMAND`, in lower case.
pub fn command_names(answer: Frame) -> Option<BTreeSet<String>> {
    let name = |command: &Frame| match command {
        Frame::Array(fields) => fields.first().and_then(Frame::as_str).map(str::to_ascii_lowercase),
        name => name.as_str().map(str::to_ascii_lowercase),
    };
    Some(answer.into_array().ok()?.iter().filter_map(name).collect())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn conversion(known: &[&str]) -> Conversion {
        let commands = known.iter().map(|name| (*name).to_owned()).collect();
        let release = Release { family: "Valkey", major: 8, minor: 1 };
        Conversion {
            format: Format::COMMON,
            left_out: Options::default(),
            known: Arc::new(Known { commands, release }),
        }
    }

    #[test]
    fn a_primary_that_has_run_what_the_server_lacks_is_refused_by_name() {
        let url: ServerUrl = "redis://h:1".parse().unwrap();
        let ran = |names: &[&str]| {
            let text: String = names.iter().map(|name| format!("cmdstat_{name}:calls=1,usec=2\r\n")).collect();
            Info::parse(text.as_bytes())
        };
        let conversion = conversion(&["set", "xgroup", "get", "lpop", "rpop", "hdel", "del", "hincrbyfloat"]);
        let server =
            |family, major| Facts { family, version: Some(Version { major, minor: 0, patch: 0 }), ..Facts::default() };
        let (redis, valkey) = (server(Family::Redis, 8), server(Family::Valkey, 9));
        for fine in [&["set", "get", "xgroup|create"][..], &["lmpop"], &["hgetdel", "delex"], &["ft.search", "vsim"]] {
            conversion.check_commands(&ran(fine), &redis, &url).unwrap();
        }
        let refused =
            conversion.check_commands(&ran(&["set", "hexpire", "vadd", "xackdel"]), &redis, &url).unwrap_err();
        for name in ["HEXPIRE", "VADD", "XACKDEL", "redis://h:1", "CONFIG RESETSTAT"] {
            assert!(refused.message.contains(name), "{refused}");
        }
        for (name, by) in
            [("function|load", &redis), ("hgetdel", &valkey), ("delifeq", &redis), ("hincrbyfloat", &redis)]
        {
            assert!(conversion.check_commands(&ran(&[name]), by, &url).is_err(), "{name}");
        }
        for by in [server(Family::Redis, 7), valkey] {
            conversion.check_commands(&ran(&["hincrbyfloat"]), &by, &url).unwrap();
        }
    }

    #[test]
    fn both_answers_name_the_commands() {
        let text = |text: &str| Frame::Bulk(text.as_bytes().to_vec());
        let list = Frame::Array(vec![text("GET"), text("set")]);
        let rows =
            Frame::Array(vec![Frame::Array(vec![text("get"), Frame::Integer(2)]), Frame::Array(vec![text("set")])]);
        let wanted: BTreeSet<String> = ["get", "set"].map(str::to_owned).into();
        assert_eq!(command_names(list), Some(wanted.clone()));
        assert_eq!(command_names(rows), Some(wanted));
        assert_eq!(command_names(Frame::Null), None);
    }
}
