//! The events of the log: what a reader of it, whether a program or a test, may rely on.
//!
//! A sentence of the log is for people, and changes when a better one is found. The name of an event and its fields
//! stay. [docs/reference/log.md](../../docs/reference/log.md#the-log) has them as a table, which a test holds to this
//! list.
//!
//! ```text
//!   tracing::info!(event = events::IN_STEP, offset, "in step; …")
//!      --log-json              {"timestamp":…,"level":"INFO","message":"in step; …","event":"in_step","offset":14,"target":…}
//!      else                    in step; … offset=14
//!      else, with NAMES set    in step; … offset=14 event=in_step
//! ```

use std::fmt::{self, Debug};

use tracing::field::{Field, Visit};
use tracing_subscriber::{
    field::{RecordFields, VisitOutput},
    fmt::{
        FormatFields,
        format::{DefaultVisitor, Writer},
    },
};

/// The field of a log record that holds the name of its event.
const FIELD: &str = "event";

/// The environment variable that has lines for people end with the names of their events. It is for programs that read
/// the log of an agent which they did not start with `--log-json`.
pub const NAMES: &str = "REMORA_LOG_EVENTS";

/// For each event: what has happened, the constant that code uses, the name in the log, and the fields.
macro_rules! events {
    ($($(#[doc = $text:literal])+ $constant:ident = $name:literal [$($field:literal),*];)+) => {
        $($(#[doc = $text])+ pub const $constant: &str = $name;)+

        /// The names of all of them.
        const KNOWN: &[&str] = &[$($name),+];

        /// All of them, in the order of the documentation.
        #[cfg(test)]
        const ALL: &[tests::Event] = &[$(tests::Event {
            constant: stringify!($constant),
            name: $name,
            text: concat!($($text),+),
            fields: &[$($field),*],
        }),+];
    };
}

events! {
    /// A command waits for a server, a source or a Sentinel, and will try again; the sentence says why.
    RETRYING = "retrying" [];
    /// A peer or a data lane was refused before it could ask for anything; the sentence says why.
    CONNECTION_REJECTED = "connection_rejected" ["peer"];
    /// A SIGHUP had the token files read again.
    TOKENS_REREAD = "tokens_reread" [];
    /// The token files could not be read again: what was read before stays valid.
    TOKENS_KEPT = "tokens_kept" [];
    /// A SIGHUP had the files of certificates, and of passwords, read again.
    CERTIFICATES_REREAD = "certificates_reread" [];
    /// Those files could not be read again: what was read before stays valid.
    CERTIFICATES_KEPT = "certificates_kept" ["error"];

    /// The source accepts connections.
    SOURCE_READY = "source_ready" ["listening", "server", "version", "memory", "security"];
    /// The source asks its server for a snapshot.
    SNAPSHOT_REQUESTED = "snapshot_requested" ["generation", "with_stream"];
    /// The server began a snapshot, at this offset of this history.
    SNAPSHOT_STARTED = "snapshot_started" ["generation", "replid", "offset"];
    /// The whole snapshot is in the source's memory.
    SNAPSHOT_COMPLETED = "snapshot_completed" ["generation", "size", "compression", "method"];
    /// The snapshot failed before it was complete.
    SNAPSHOT_FAILED = "snapshot_failed" ["generation", "error"];
    /// A source that was restarted goes on with the snapshot that the service manager has kept.
    SNAPSHOT_KEPT = "snapshot_kept" ["generation", "size", "offset"];
    /// The service manager has kept a snapshot that cannot be used.
    SNAPSHOT_UNUSABLE = "snapshot_unusable" ["why"];
    /// The source gets its server's stream again, from the byte at which it broke.
    STREAM_RESUMED = "stream_resumed" [];
    /// The source cannot resume its server's stream.
    STREAM_LOST = "stream_lost" ["text"];
    /// A standby copies the snapshot of the first source.
    STANDBY_COPIES = "standby_copies" ["generation", "with_stream"];
    /// Nothing can be copied from the first source; the sentence says why.
    STANDBY_WAITS = "standby_waits" ["first"];
    /// A source has a standby there.
    STANDBY_KNOWN = "standby_known" ["address"];
    /// The server has another replication history: the stream of the old one ends at this offset.
    HISTORY_CHANGED = "history_changed" ["generation", "old", "new", "offset"];
    /// The source has closed its link to a server that is being shut down.
    SHUTDOWN_SEEN = "shutdown_seen" ["offset"];
    /// The source captures another server of the group that Sentinels watch.
    SOURCE_MOVED = "source_moved" ["from", "to"];
    /// The source has ended a `FAILOVER` that waited for it.
    FAILOVER_ENDED = "failover_ended" [];
    /// A `FAILOVER` waits for the source, which may not end it.
    FAILOVER_WAITS = "failover_waits" ["error"];
    /// The server's commands no longer wait for the source when slots move.
    SLOT_MOVES_FREE = "slot_moves_free" [];
    /// A replica has joined.
    REPLICA_JOINED = "replica_joined" ["replica", "address", "server", "resumes", "protection"];
    /// A replica reads by this transport from now on.
    REPLICA_READS = "replica_reads" ["replica", "transport", "protection"];
    /// The source has told a replica to read from another replica, or from the source again.
    UPSTREAM_ASSIGNED = "upstream_assigned" ["reader", "from"];
    /// A replica has said that it is done, or why it failed.
    REPLICA_LEFT = "replica_left" ["replica", "outcome", "text"];
    /// The connection of a replica ended before it was done.
    REPLICA_DISCONNECTED = "replica_disconnected" ["address", "fault"];

    /// The replica agent listens for its server.
    LINK_LISTENING = "link_listening" ["link"];
    /// The server follows the link of its agent.
    LINK_FOLLOWED = "link_followed" [];
    /// The source has no snapshot to offer yet; the sentence says why.
    SNAPSHOT_AWAITED = "snapshot_awaited" [];
    /// The replica reads from the source.
    SOURCE_READ = "source_read" ["transport", "why", "protection", "generation", "offset"];
    /// The replica reads slots from another replica.
    UPSTREAM_READ = "upstream_read" ["peer", "address", "transport", "protection"];
    /// The replica reads no more from another replica; the sentence says why.
    UPSTREAM_LEFT = "upstream_left" ["peer"];
    /// Other replicas can read slots from this one.
    SERVING = "serving" ["listening"];
    /// RDMA to the source has ended, and another transport takes its place.
    RDMA_ENDED = "rdma_ended" ["now", "why"];
    /// The connection to the source was lost, and will be tried again.
    SOURCE_LOST = "source_lost" [];
    /// The next one of the addresses in `--source` is used; the sentence says why.
    SOURCE_CHANGED = "source_changed" ["from", "to"];
    /// The source has given up the snapshot that the replica was reading.
    SNAPSHOT_GIVEN_UP = "snapshot_given_up" ["generation"];
    /// The server has to load another snapshot of the source.
    LOADING_AGAIN = "loading_again" [];
    /// The server has restarted, and is redirected to the link again.
    SERVER_RESTARTED = "server_restarted" [];
    /// The server could not execute commands of the stream: it is no exact replica.
    COMMANDS_FAILED = "commands_failed" [];
    /// The server has applied the stream up to this offset, and the agent stays as its feed (`--stay`).
    IN_STEP = "in_step" ["offset"];
    /// The server is pointed at its primary; the sentence says when and why.
    HANDING_OVER = "handing_over" ["primary"];
    /// At the hand-off the primary did not continue the server, which takes a full copy.
    FULL_COPY = "full_copy" [];
    /// The server is in step, and the agent stays until a Sentinel knows it.
    SENTINEL_AWAITED = "sentinel_awaited" [];

    /// `remora attend` waits for its server's connections.
    ATTENDING = "attending" ["server", "port", "ports"];
    /// The server has asked for a full copy, and a source serves it.
    COPY_SERVED = "copy_served" ["primary"];
    /// A request of the server goes to its primary; the sentence says why.
    PASSED_ON = "passed_on" ["primary"];
    /// The server asks another primary than the one of the sync under way, which ends.
    PRIMARY_CHANGED = "primary_changed" ["primary"];
    /// The server follows its primary by itself after a sync through the agent.
    COPY_DONE = "copy_done" [];

    /// `remora fetch`, `snapshot mount` or a delivery by file begins to receive a snapshot, or goes on with it.
    SNAPSHOT_ARRIVES = "snapshot_arrives" ["generation", "replid", "offset", "transport", "protection", "from"];
    /// All of its slots have arrived.
    SNAPSHOT_ARRIVED = "snapshot_arrived" ["bytes", "slots"];
    /// The file of the snapshot can be read.
    SNAPSHOT_MOUNTED = "snapshot_mounted" ["directory", "transport"];

    /// A server of volumes accepts connections.
    VOLUME_SERVER_READY = "volume_server_ready" ["listening", "memory", "protection", "store"];
    /// A volume can be used as a block device.
    VOLUME_OPEN = "volume_open" ["volume", "listening"];
    /// A volume can be used as the file of an image.
    IMAGE_MOUNTED = "image_mounted" ["volume", "file", "transport"];
    /// The files of a volume can be used.
    FILES_MOUNTED = "files_mounted" ["volume", "directory", "transport"];
}

/// Whether an event has this name. Other crates log fields of this name, too.
fn is_known(name: &str) -> bool {
    KNOWN.contains(&name)
}

/// The fields of a record as a person reads them: without the name of its event, unless [`NAMES`] asks for it.
#[derive(Debug)]
pub struct ForPeople {
    names: bool,
}

impl ForPeople {
    /// As [`NAMES`] says.
    pub fn from_environment() -> Self {
        Self { names: std::env::var_os(NAMES).is_some_and(|value| !value.is_empty()) }
    }
}

impl<'writer> FormatFields<'writer> for ForPeople {
    fn format_fields<R: RecordFields>(&self, mut writer: Writer<'writer>, fields: R) -> fmt::Result {
        let mut visitor = WithoutEvent { shown: DefaultVisitor::new(writer.by_ref(), true), event: None };
        fields.record(&mut visitor);
        let WithoutEvent { shown, event } = visitor;
        shown.finish()?;
        match event.filter(|_| self.names) {
            Some(event) => write!(writer, " {FIELD}={event}"),
            None => Ok(()),
        }
    }
}

/// Shows all fields but the name of an event.
struct WithoutEvent<'a> {
    shown: DefaultVisitor<'a>,
    event: Option<String>,
}

impl Visit for WithoutEvent<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() == FIELD && is_known(value) {
            true => self.event = Some(value.to_owned()),
            false => self.shown.record_str(field, value),
        }
    }

    fn record_error(&mut self, field: &Field, value: &(dyn std::error::Error + 'static)) {
        self.shown.record_error(field, value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.shown.record_debug(field, value);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::{
        collections::BTreeSet,
        fs,
        path::{Path, PathBuf},
        sync::{Arc, Mutex},
    };

    use super::*;

    /// One event, as documented.
    pub(super) struct Event {
        /// The constant by which the code emits it.
        pub(super) constant: &'static str,
        /// Its name in the log.
        pub(super) name: &'static str,
        /// What has happened.
        pub(super) text: &'static str,
        /// The fields that each record of it has.
        pub(super) fields: &'static [&'static str],
    }

    /// The files below this folder that contain Rust.
    fn sources(folder: &Path) -> Vec<PathBuf> {
        let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let (folders, files): (Vec<_>, Vec<_>) = entries.partition(|path| path.is_dir());
        let own = files.into_iter().filter(|path| path.extension().is_some_and(|end| end == "rs"));
        own.chain(folders.iter().flat_map(|folder| sources(folder))).collect()
    }

    fn root() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
    }

    /// The folders `src` of all crates that stand beside this one.
    fn crates() -> Vec<PathBuf> {
        let folders = fs::read_dir(root()).unwrap().map(|entry| entry.unwrap().path().join("src"));
        folders.filter(|folder| folder.is_dir()).collect()
    }

    #[test]
    fn the_documentation_has_each_event_and_no_other() {
        let page = fs::read_to_string(root().join("docs/reference/log.md")).unwrap();
        let section = page.split("\n## The log\n").nth(1).unwrap().split("\n## ").next().unwrap();
        let documented: Vec<&str> = section.lines().filter(|line| line.starts_with("| `")).collect();
        let quoted = |field: &&str| format!("`{field}`");
        let row = |event: &Event| {
            let fields: Vec<String> = event.fields.iter().map(quoted).collect();
            format!("| `{}` | {} | {} |", event.name, event.text.trim(), fields.join(", ")).replace("|  |", "| |")
        };
        let expected: Vec<String> = ALL.iter().map(row).collect();
        assert_eq!(documented, expected, "the table should be:\n{}", expected.join("\n"));
    }

    #[test]
    fn each_event_has_one_name_in_snake_case() {
        let names: BTreeSet<&str> = ALL.iter().map(|event| event.name).collect();
        assert_eq!(names.len(), ALL.len());
        assert!(names.iter().all(|name| name.bytes().all(|byte| byte == b'_' || byte.is_ascii_lowercase())));
    }

    #[test]
    fn each_event_is_emitted_with_its_fields() {
        let files = crates().into_iter().flat_map(|folder| sources(&folder));
        let texts: Vec<String> = files.map(|path| fs::read_to_string(path).unwrap()).collect();
        for event in ALL {
            let mark = format!("{FIELD} = events::{},", event.constant);
            let records: Vec<&str> = texts.iter().flat_map(|text| text.split(&mark).skip(1)).collect();
            assert!(!records.is_empty(), "{} is emitted nowhere", event.constant);
            for record in records {
                let fields = record.split(");").next().unwrap();
                let has =
                    |field: &&str| fields.split(|c: char| c != '_' && !c.is_alphanumeric()).any(|word| word == *field);
                let lacks: Vec<_> = event.fields.iter().filter(|field| !has(field)).collect();
                assert!(lacks.is_empty(), "{} without {lacks:?}: {fields}", event.constant);
            }
        }
    }

    #[test]
    fn each_event_that_a_test_awaits_is_one() {
        for path in sources(&root().join("agent/tests")) {
            let text = fs::read_to_string(&path).unwrap();
            for awaited in text.split("wait_for_event(\"").skip(1) {
                let name = awaited.split('"').next().unwrap();
                assert!(is_known(name), "{name} in {}", path.display());
            }
        }
    }

    /// What a subscriber of this kind writes.
    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl std::io::Write for Written {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn record() {
        tracing::info!(event = IN_STEP, offset = 14, name = "a b", "in step");
        tracing::info!(event = "of another crate", "else");
    }

    fn for_people(names: bool) -> String {
        let written = Written::default();
        let to = written.clone();
        let builder = tracing_subscriber::fmt().without_time().with_target(false).with_ansi(false);
        let subscriber = builder.fmt_fields(ForPeople { names }).with_writer(move || to.clone()).finish();
        tracing::subscriber::with_default(subscriber, record);
        String::from_utf8(written.0.lock().unwrap().clone()).unwrap()
    }

    #[test]
    fn people_see_the_name_of_an_event_only_if_they_ask_for_it() {
        let other = " INFO else event=\"of another crate\"\n";
        assert_eq!(for_people(false), format!(" INFO in step offset=14 name=\"a b\"\n{other}"));
        assert_eq!(for_people(true), format!(" INFO in step offset=14 name=\"a b\" event=in_step\n{other}"));
    }

    #[test]
    fn a_collector_of_logs_finds_each_field_under_its_own_name() {
        let written = Written::default();
        let to = written.clone();
        let subscriber = tracing_subscriber::fmt().json().flatten_event(true).with_writer(move || to.clone()).finish();
        tracing::subscriber::with_default(subscriber, record);
        let text = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
        let first: serde_json::Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
        assert_eq!((&first["event"], &first["offset"]), (&"in_step".into(), &14.into()));
        assert_eq!((&first["level"], &first["message"]), (&"INFO".into(), &"in step".into()));
        assert!(first["timestamp"].is_string() && first["target"].is_string(), "{first}");
    }

    #[test]
    fn no_field_of_an_event_has_the_name_of_a_field_of_each_line() {
        let taken = ["timestamp", "level", "message", "target", FIELD];
        let fields = ALL.iter().flat_map(|event| event.fields);
        fields.for_each(|field| assert!(!taken.contains(field), "{field}"));
    }
}
