//! Register: every family that an agent exports, with its type, its labels, and what to do when its value is bad.
//!
//! Agents name families by these constants, so that no name, help or label is written twice. A test compares the tables
//! in `docs/reference/metrics.md` with this register, and another one what agents export.

/// Names and values that belong together.
#[derive(Debug, PartialEq, Eq)]
pub struct Family {
    /// Without the prefix, and without the suffix that its kind brings.
    pub name: &'static str,
    /// Its type.
    pub kind: Kind,
    /// The names of its labels.
    pub labels: &'static [&'static str],
    /// The commands that export it.
    pub agents: &'static [Agent],
    /// One phrase without a full stop: the encoder adds it.
    pub help: &'static str,
    /// What to do when the value is bad; empty if no value is. For the manual only.
    #[cfg(test)]
    pub advice: &'static str,
}

/// The type of a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A value that rises and falls.
    Gauge,
    /// A count that only rises.
    Counter,
    /// Labels, and the value 1.
    Info,
}

/// A command that exports metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Agent {
    /// `remora source`.
    Source,
    /// `remora replica`.
    Replica,
    /// `remora attend`.
    Attend,
    /// `remora fetch`.
    Fetch,
    /// `remora backup`.
    Backup,
    /// `remora volume serve`.
    Serve,
    /// `remora volume nbd`.
    Nbd,
    /// `remora volume mount`.
    Mount,
}

/// The unit of a family's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// A rate.
    BytesPerSecond,
    /// Seconds since 1970.
    Moment,
    /// A length of time.
    Seconds,
    /// A size.
    Bytes,
    /// A place in a stream.
    Offset,
    /// A part of a whole, 0 to 1.
    Ratio,
    /// Slots of a table.
    Slots,
    /// Blocks of a volume.
    Blocks,
    /// 1 for the present state, and 0 for the others.
    State,
    /// A number of things.
    Count,
    /// The value of an info, which says nothing.
    One,
}

use Agent::{Attend, Backup, Fetch, Mount, Nbd, Replica, Serve, Source};
use Kind::{Counter, Gauge, Info};

/// The prefix of the names of this project. Those of a process are the same for every program.
pub const PREFIX: &str = "remora";

/// How names without that prefix begin.
const OF_A_PROCESS: &str = "process_";

const EVERY: &[Agent] = &[Source, Replica, Attend, Fetch, Backup, Serve, Nbd, Mount];

/// Those that serve pages: in a file for another program, these names would be that program's.
const RESIDENT: &[Agent] = &[Source, Replica, Attend, Backup, Serve, Nbd, Mount];

/// Those that can write a file at their end.
const ONE_SHOT: &[Agent] = &[Replica, Fetch, Backup];

const SYNCS: &[Agent] = &[Replica, Attend];

const WRITERS: &[Agent] = &[Nbd, Mount];

impl Agent {
    /// As on the command line, after `remora`.
    /// The command's name, as labels have it.
    pub fn name(self) -> &'static str {
        match self {
            Source => "source",
            Replica => "replica",
            Attend => "attend",
            Fetch => "fetch",
            Backup => "backup",
            Serve => "volume serve",
            Nbd => "volume nbd",
            Mount => "volume mount",
        }
    }
}

impl Unit {
    /// How names end whose values have a unit. The first that fits counts.
    const BY_ENDING: [(&str, Unit); 10] = [
        ("_bytes_per_second", Unit::BytesPerSecond),
        ("_timestamp_seconds", Unit::Moment),
        ("_start_time_seconds", Unit::Moment),
        ("_seconds", Unit::Seconds),
        ("_bytes", Unit::Bytes),
        ("_offset", Unit::Offset),
        ("_ratio", Unit::Ratio),
        ("_slots", Unit::Slots),
        ("_blocks", Unit::Blocks),
        ("_state", Unit::State),
    ];
}

impl Family {
    /// Whether the prefix of this project is not part of its name.
    pub(crate) fn is_of_a_process(&self) -> bool {
        self.name.starts_with(OF_A_PROCESS)
    }

    /// The name under which its values are found.
    pub(crate) fn full_name(&self) -> String {
        let prefix = if self.is_of_a_process() { String::new() } else { format!("{PREFIX}_") };
        let suffix = match self.kind {
            Gauge => "",
            Counter => "_total",
            Info => "_info",
        };
        format!("{prefix}{}{suffix}", self.name)
    }

    /// The unit of its values, which its name says.
    pub fn unit(&self) -> Unit {
        let unit = Unit::BY_ENDING.into_iter().find(|(end, _)| self.name.ends_with(end)).map(|(_, unit)| unit);
        unit.unwrap_or(if self.kind == Info { Unit::One } else { Unit::Count })
    }
}

macro_rules! families {
    ($($id:ident = $kind:ident $name:literal $labels:expr, $agents:expr, $help:literal, $advice:literal;)*) => {
        $(
            #[doc = $help]
            pub static $id: Family = Family {
                name: $name,
                kind: $kind,
                labels: &$labels,
                agents: $agents,
                help: $help,
                #[cfg(test)]
                advice: $advice,
            };
        )*
        /// All of them, in the order of the manual.
        #[cfg(test)]
        pub static ALL: &[&Family] = &[$(&$id),*];
    };
}

families! {
    // ---- every agent ----
    BUILD = Info "build" ["version", "agent"], EVERY,
        "The agent's version, and which command it is",
        "Agents of one sync need the same release";
    PROCESS_CPU = Counter "process_cpu_seconds" [], RESIDENT,
        "Processor time of the agent, of user and system", "";
    PROCESS_MEMORY = Gauge "process_resident_memory_bytes" [], RESIDENT,
        "Memory of the agent that is in RAM, with the tables that it shares",
        "Compare with `--memory`";
    PROCESS_FDS = Gauge "process_open_fds" [], RESIDENT,
        "Descriptors that the agent has open",
        "Near `process_max_fds`: raise `LimitNOFILE`";
    PROCESS_MAX_FDS = Gauge "process_max_fds" [], RESIDENT,
        "Descriptors that the agent may have open", "";
    PROCESS_START = Gauge "process_start_time_seconds" [], RESIDENT,
        "When the agent was started",
        "It changes often: the agent is restarted, its log says why";
    RUN_STARTED = Gauge "run_started_timestamp_seconds" [], ONE_SHOT,
        "When the command of this file was started", "";
    RUN_ENDED = Gauge "run_ended_timestamp_seconds" [], ONE_SHOT,
        "When it ended; missing while it runs",
        "Old: the timer or job that starts it does not run";
    RUN_EXIT_CODE = Gauge "run_exit_code" [], ONE_SHOT,
        "Its exit code; missing while it runs",
        "Not 0: [the codes](exit-codes.md#exit-codes), and its log";

    // ---- source ----
    SOURCE_SERVER = Info "source_server" ["server", "role"], &[Source],
        "The server that the source captures", "";
    SOURCE_SERVER_UP = Gauge "source_server_up" [], &[Source],
        "Whether that server answers",
        "0: no new snapshot can be taken; look at the server";
    SOURCE_WRITTEN = Gauge "source_written_bytes_per_second" [], &[Source],
        "What its clients write, on average", "";
    SNAPSHOT_STATE = Gauge "snapshot_state" ["state"], &[Source],
        "1 for the state that the snapshot is in: none, capturing or complete", "";
    SNAPSHOT_BYTES = Gauge "snapshot_bytes" [], &[Source],
        "Bytes of the snapshot that were received; these families are missing without a snapshot", "";
    SNAPSHOT_PROGRESS = Gauge "snapshot_progress_ratio" [], &[Source],
        "The part of it that the source has received; 1 once it is whole, missing while its length is not known",
        "It stands still below 1: the server's child, or replicas that read slowly from a window";
    SNAPSHOT_STORED = Gauge "snapshot_stored_bytes" [], &[Source],
        "Bytes that replicas on other hosts read for it: fewer if slots are compressed",
        "Near `remora_snapshot_bytes` on a slow link: `remora status` says why";
    SNAPSHOT_SLOTS = Gauge "snapshot_slots" [], &[Source],
        "Slots of its table", "";
    SNAPSHOT_PUBLISHED = Gauge "snapshot_published_slots" [], &[Source],
        "Slots that replicas can read, or could", "";
    SNAPSHOT_RETIRED = Gauge "snapshot_retired_slots" [], &[Source],
        "Slots that were used again", "";
    SNAPSHOT_WINDOWED = Gauge "snapshot_windowed" [], &[Source],
        "Whether slots are used again, so that no replica can join late",
        "1: more `--memory` would hold the whole snapshot";
    SNAPSHOT_GENERATION = Gauge "snapshot_generation" [], &[Source],
        "The number of the snapshot", "";
    SNAPSHOT_OFFSET = Gauge "snapshot_offset" [], &[Source],
        "Its replication offset", "";
    SNAPSHOT_STARTED = Gauge "snapshot_started_timestamp_seconds" [], &[Source],
        "When it was begun",
        "Old, and replicas wait: the next fork waits for `--fork-interval`, or fails";
    SNAPSHOT_CAPTURE = Gauge "snapshot_capture_duration_seconds" [], &[Source],
        "How long the capture took, or has taken so far", "";
    JOURNAL_FIRST = Gauge "journal_first_offset" [], &[Source],
        "The offset of the oldest byte in the journal", "";
    JOURNAL_END = Gauge "journal_end_offset" [], &[Source],
        "The offset behind its newest byte",
        "It stands still under writes: the source's stream is lost, its log says why";
    MEMORY_USED = Gauge "memory_used_bytes" [], &[Source],
        "Memory of both tables that is in use", "";
    MEMORY_LIMIT = Gauge "memory_limit_bytes" [], &[Source],
        "The most that they may use",
        "Nearly used: the journal drops its oldest bytes next; raise `--memory`";
    BACKLOG = Gauge "primary_backlog_bytes" [], &[Source],
        "The size of the primary's backlog, where the source is beside the primary", "";
    BACKLOG_HEADROOM = Gauge "primary_backlog_headroom_seconds" [], &[Source],
        "Until the snapshot's offset leaves the backlog, at that rate of writes; missing if nothing is written",
        "Short: files of `remora fetch` are stale soon; raise `repl-backlog-size`";
    SNAPSHOTS = Counter "snapshots" ["result"], &[Source],
        "Snapshots since the source started, taken and failed",
        "`failed` grows: the source's log says why, often `client-output-buffer-limit` or memory for the fork";
    FORKS = Counter "forks" [], &[Source],
        "How often the server has forked for snapshots since the source started, failed ones included",
        "It grows with every sync: `remora status` says which bases were passed over, and why";
    BASE = Gauge "base" ["kind"], &[Source],
        "1 for that from which a replica is made that joins now",
        "`fork` although there is another base, or `none`: `remora status` says why";
    SYNCS_DONE = Counter "syncs_done" [], &[Source],
        "Replicas that ended in step with their primary", "";
    SERVED = Counter "served_bytes" [], &[Source],
        "Bytes of tables that replicas have read over the network", "";
    UPLOAD_RATE = Gauge "upload_limit_bytes_per_second" [], &[Source],
        "The rate at which the source may send over TCP at present; missing unless `--upload-limit` is `auto`", "";
    UPLOAD_QUEUEING = Gauge "upload_queueing_seconds" [], &[Source],
        "How long its bytes wait in the queue of the network link", "";
    UPLOAD_YIELDS = Gauge "upload_yields" [], &[Source],
        "Whether the source sends less because other traffic fills the network link",
        "1 for long: a sync takes up to sixteen times as long; `--upload-limit none` takes the link from others";
    STANDBY_COPY = Gauge "standby_copy" [], &[Source],
        "Whether this standby has a whole snapshot (`--standby-of`)", "0 for long: the log says why (`standby_waits`)";
    STANDBY_LAG = Gauge "standby_lag_bytes" [], &[Source],
        "Bytes of the stream that it lacks", "";
    REPLICAS = Gauge "replicas" ["phase"], &[Source],
        "Replicas that have joined, by what they do",
        "Many in `waiting`: the next snapshot is awaited, or their turn (`--at-once`); `remora status` says which";
    REPLICA = Gauge "replica_info" ["replica", "address", "zone", "transport", "reads_from"], &[Source],
        "What is known of a replica, and 1",
        "Another transport than expected: `remora status` says why";
    REPLICA_PROGRESS = Gauge "replica_progress_ratio" ["replica"], &[Source],
        "The part of the snapshot that a replica holds; missing while the snapshot's length is not known",
        "It stands still below 1: the replica, its server or the network between; the agent's log";
    REPLICA_RATE = Gauge "replica_read_bytes_per_second" ["replica"], &[Source],
        "How fast it reads, on the average of five seconds",
        "Low: `remora probe` measures the path; `--upload-limit` and `--download-limit`";
    REPLICA_LAG = Gauge "replica_lag_bytes" ["replica"], &[Source],
        "Bytes of the journal that its server has yet to apply; missing before it has acknowledged any",
        "It grows: the server applies slower than the primary writes";
    REPLICA_APPLIED = Gauge "replica_applied_offset" ["replica"], &[Source],
        "The offset that its server has acknowledged; missing before",
        "Near `remora_journal_first_offset`: the journal is about to drop what this replica needs; raise `--memory`";
    REPLICA_SILENT = Gauge "replica_silent_seconds" ["replica"], &[Source],
        "Since its last message",
        "More than some seconds: the agent hangs, or its host is gone";
    REPLICA_JOINED = Gauge "replica_joined_seconds" ["replica"], &[Source],
        "Since it joined", "";
    REPLICA_SERVES = Gauge "replica_serves_slots" ["replica"], &[Source],
        "Whether others may read from it", "";

    // ---- replica, attend ----
    SYNC = Info "sync" ["server", "primary", "source", "transport", "delivery"], SYNCS,
        "The sync that is under way, or was the last; these families of `remora attend` are missing without one", "";
    SYNC_PHASE = Gauge "sync_phase" ["phase"], SYNCS,
        "1 for the phase that the sync is in; after a failure for none",
        "`transfer` or `load` for long: compare the bytes below with a minute before";
    SYNC_STARTED = Gauge "sync_started_timestamp_seconds" [], SYNCS,
        "When the agent asked the source for a snapshot", "";
    SYNC_PHASE_DURATION = Gauge "sync_phase_duration_seconds" ["phase"], SYNCS,
        "How long each phase took, or has taken so far", "";
    SYNC_SOURCE_UP = Gauge "sync_source_up" [], SYNCS,
        "Whether the agent is connected to the source",
        "0: the source is gone or not reachable; the sync goes on when it is back, for `--retry-for` at most";
    SYNC_KNOWN = Gauge "sync_snapshot_bytes" [], SYNCS,
        "Bytes of the snapshot that the source has published so far", "";
    SYNC_FETCHED = Gauge "sync_fetched_bytes" [], SYNCS,
        "Bytes of it that have arrived",
        "It stands still in `transfer`: the source or the network";
    SYNC_DELIVERED = Gauge "sync_delivered_bytes" [], SYNCS,
        "Bytes of it that the server was given",
        "It stands still while bytes have arrived: the server does not load, its log says why";
    SYNC_REFERRED = Gauge "sync_referred_bytes" [], SYNCS,
        "Bytes of it that the server's module loaded out of shared memory", "";
    SYNC_SLOTS = Gauge "sync_slots" [], SYNCS,
        "Slots of the whole snapshot; 0 while unknown", "";
    SYNC_HELD = Gauge "sync_held_slots" [], SYNCS,
        "Slots of it that have arrived and match their checksums", "";
    SYNC_PROGRESS = Gauge "sync_progress_ratio" [], SYNCS,
        "The part of the snapshot that has arrived; 0 while its length is not known",
        "It stands still below 1: see `remora_sync_fetched_bytes`";
    SYNC_EXPECTED = Gauge "sync_expected_bytes" [], SYNCS,
        "Bytes of the whole snapshot, estimated while it is taken; 0 while nothing is known", "";
    SYNC_RATE = Gauge "sync_read_bytes_per_second" [], SYNCS,
        "How fast it arrives, on the average of five seconds", "";
    SYNC_LEFT = Gauge "sync_left_seconds" [], SYNCS,
        "Until the rest has arrived at that rate; missing if nothing arrives, or if that is not known", "";
    SYNC_OFFSET = Gauge "sync_snapshot_offset" [], SYNCS,
        "The snapshot's replication offset", "";
    SYNC_STREAM_FETCHED = Gauge "sync_stream_fetched_offset" [], SYNCS,
        "The last byte of the stream that has arrived", "";
    SYNC_STREAM_DELIVERED = Gauge "sync_stream_delivered_offset" [], SYNCS,
        "The last byte of the stream that the server was given", "";
    SYNC_ACKNOWLEDGED = Gauge "sync_acknowledged_offset" [], SYNCS,
        "The last byte of the stream that the server acknowledged; 0 before it has loaded", "";
    SYNC_LAG = Gauge "sync_lag_bytes" [], SYNCS,
        "Bytes of the stream that have arrived and that the server has yet to apply; missing before it has loaded",
        "It grows: the server applies slower than the primary writes";
    SYNC_READERS = Gauge "sync_readers" [], SYNCS,
        "Other replicas that read slots from this one", "";
    SYNC_INTERRUPTIONS = Counter "sync_interruptions" [], SYNCS,
        "How often the feed or the link was lost",
        "It grows: the path to the source, or a server that breaks off its load; the agent's log";
    SYNC_STRANGERS = Counter "sync_strangers" [], SYNCS,
        "Connections to the link's port that were closed before they had logged in",
        "It grows: another program connects to that port";
    ATTEND_RULES = Gauge "attend_rules" [], &[Attend],
        "Whether the rules of `remora intercept` heed the agent",
        "0: the server takes its full copies from the primary; run `remora intercept add` again";
    ATTEND_OPEN = Gauge "attend_open" [], &[Attend],
        "Whether the server's new connections come to the agent; not so while it goes to its primary", "";
    ATTEND_SYNCING = Gauge "attend_syncing" [], &[Attend],
        "Whether a full copy is being served", "";
    ATTEND_SYNCS = Counter "attend_syncs" ["result"], &[Attend],
        "Full copies that were served to their end, or failed",
        "`failed` grows: the server then takes its copy from the primary; the agent's log";
    ATTEND_PASSED = Counter "attend_passed" [], &[Attend],
        "Requests of the server that its primary answered: it could continue the server, or no source could help",
        "It grows with the primary's `sync_full`: no source serves the primary's history";

    // ---- fetch, backup ----
    FETCH_BYTES = Gauge "fetch_received_bytes" [], &[Fetch, Backup],
        "Bytes of the snapshot that have arrived; missing before the first and, with `--journal`, when it has its name",
        "It stands still: the source or the network";
    FETCH_SLOTS = Gauge "fetch_received_slots" [], &[Fetch, Backup],
        "Slots of it that have arrived", "";
    FETCH_OFFSET = Gauge "fetch_snapshot_offset" [], &[Fetch],
        "The replication offset of the file, once it is whole", "";
    FETCH_HEADROOM = Gauge "fetch_headroom_seconds" [], &[Fetch],
        "For how long the primary would go on from the file, as of its end; missing if nothing is written",
        "0 or short: raise `repl-backlog-size` at the primary, or fetch again";
    BACKUP_TAKEN = Gauge "backup_newest_taken_timestamp_seconds" [], &[Backup],
        "When the snapshot of the newest whole backup was taken; missing without one",
        "Old: backups fail or do not run; `remora_run_exit_code` and the log";
    BACKUP_BYTES = Gauge "backup_newest_bytes" [], &[Backup],
        "Bytes of that snapshot", "";
    BACKUP_BEGINNING = Gauge "backup_beginning" [], &[Backup],
        "Whether a new snapshot is being read", "";
    BACKUP_SOURCE_UP = Gauge "backup_source_up" [], &[Backup],
        "With `--journal`: whether the commands are being read from the source",
        "0: what is written now is in no backup until the source is back, and is lost if its journal ends meanwhile";
    BACKUP_RECORDED = Gauge "backup_recorded_offset" [], &[Backup],
        "With `--journal`: the last byte of the stream that was received", "";
    BACKUP_NOTED = Gauge "backup_recorded_timestamp_seconds" [], &[Backup],
        "With `--journal`: the newest second with a command that can be restored to; it stands still if nothing is written",
        "Old although the primary is written to: see `remora_backup_source_up`";

    // ---- volumes ----
    SERVER_COPIES = Gauge "volume_server_copies" [], &[Serve],
        "Copies of volumes that this server has", "";
    COPY_STATE = Gauge "volume_copy_state" ["volume", "state"], &[Serve],
        "1 for the state of the copy: whole, behind or empty",
        "`behind` or `empty` for long: no writer takes it back; open the volume, or `remora volume repair`";
    COPY_CUT = Gauge "volume_copy_cut" ["volume"], &[Serve],
        "Whether the copy may lack writes since its server lost power",
        "1: the next writer finds out; `remora volume repair` if none comes";
    COPY_STORED = Gauge "volume_copy_stored" ["volume"], &[Serve],
        "Whether the copy is on the disk, too", "";
    COPY_WRITER_SILENT = Gauge "volume_copy_writer_silent_seconds" ["volume"], &[Serve],
        "Since the writer's last message; missing if it is not connected",
        "Missing or long at all servers: the volume has no writer";
    COPY_CATCH_UP = Gauge "volume_copy_compared_blocks" ["volume"], &[Serve],
        "Blocks that the catch-up under way has compared; missing if none is", "";
    COPY_SCRUB = Gauge "volume_copy_scrubbed_blocks" ["volume"], &[Serve],
        "Blocks that the scrub under way has read; missing if none is", "";
    SERVER_MEMORY_USED = Gauge "volume_server_memory_used_bytes" [], &[Serve],
        "Memory that copies and writers use", "";
    SERVER_MEMORY_LIMIT = Gauge "volume_server_memory_limit_bytes" [], &[Serve],
        "What they may use (`--memory`)",
        "Nearly used: no further volume fits; raise `--memory`";
    SERVER_STAGING_USED = Gauge "volume_server_staging_used_bytes" [], &[Serve],
        "Bytes of writes that writers may have under way at present", "";
    SERVER_STAGING_LIMIT = Gauge "volume_server_staging_limit_bytes" [], &[Serve],
        "The most that all may have (`--staging`)",
        "Nearly used: writers hold each other up; raise `--staging`";
    VOLUME = Info "volume" ["volume", "file"], WRITERS,
        "The volume that is open", "";
    VOLUME_OPEN = Gauge "volume_open" [], WRITERS,
        "Whether it can be used",
        "0: it has ended, another writer has opened it or too few copies are there; the log says which";
    VOLUME_BLOCKS = Gauge "volume_size_blocks" [], WRITERS,
        "Its size", "";
    VOLUME_COPIES = Gauge "volume_copies" [], WRITERS,
        "How many copies it should have", "";
    VOLUME_ACKNOWLEDGE = Gauge "volume_acknowledge_copies" [], WRITERS,
        "How many must hold a write before it is acknowledged", "";
    VOLUME_MEMBERS = Gauge "volume_members" [], WRITERS,
        "Copies that are whole and get every write; missing for a read-only mount",
        "Fewer than `remora_volume_copies`: a server is gone or catches up, `remora volume status` says which";
    VOLUME_MEMBER = Gauge "volume_member" ["server"], WRITERS,
        "Whether the copy of this server is one of them",
        "0 for long: that server is down, or cannot be reached from here";
    VOLUME_COMPARED = Gauge "volume_compared_blocks" ["server"], WRITERS,
        "Blocks that the catch-up of this server's copy has compared; missing if none is under way", "";
    VOLUME_READS = Counter "volume_reads" ["way"], WRITERS,
        "Reads, by how they were answered: in memory `here`, `far`, or `asked` of a server; `memory` for a read-only mount",
        "`asked` where `here` was expected: no server of this host shares its memory";
    VOLUME_WRITES = Counter "volume_writes" ["way"], WRITERS,
        "Writes to each server, by how their blocks went: inline or pulled", "";
    VOLUME_WRITTEN = Counter "volume_written_bytes" [], WRITERS,
        "Bytes that went to servers for them", "";
    VOLUME_QUESTIONS = Counter "volume_questions" [], &[Mount],
        "Of a read-only mount: questions to servers, which reads themselves do not need", "";
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::BTreeSet;

    use super::*;

    /// The manual's tables: one for each run of families that the same agents export.
    fn tables() -> String {
        let runs = ALL.chunk_by(|family, next| family.agents == next.agents).map(|families| {
            let agents = match families[0].agents {
                agents if agents == EVERY => "all".to_owned(),
                agents if agents == RESIDENT => "all but `fetch`, never in a file".to_owned(),
                agents => agents.iter().map(|agent| agent.name()).collect::<Vec<_>>().join(", "),
            };
            let rows = families.iter().map(|family| {
                let labels = match family.labels {
                    [] => String::new(),
                    labels => format!("{{{}}}", labels.join(",")),
                };
                format!("| `{}{labels}` | {} | {} |\n", family.full_name(), family.help, family.advice)
            });
            format!("| {agents} | what it is | when it is bad |\n|---|---|---|\n{}", rows.collect::<String>())
        });
        runs.collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn the_manual_has_these_tables() {
        let (manual, tables) = (include_str!("../../docs/reference/metrics.md"), tables());
        let has = |line: &str| manual.lines().any(|other| other == line);
        let wrong: Vec<&str> = tables.lines().filter(|line| !has(line)).collect();
        let wrong = wrong.join("\n");
        assert!(manual.contains(&tables), "docs/reference/metrics.md lacks, or has in another order:\n{wrong}");
    }

    #[test]
    fn names_are_unique_and_say_their_units() {
        let names: BTreeSet<String> = ALL.iter().map(|family| family.full_name()).collect();
        assert_eq!(names.len(), ALL.len());
        for family in ALL {
            let name = family.full_name();
            assert!(name.chars().all(|sign| sign.is_ascii_lowercase() || sign == '_'), "{name}");
            assert!(!family.help.is_empty() && !family.help.ends_with('.'), "{name}: {}", family.help);
            assert!(family.kind == Info || !family.name.ends_with("_total"), "{name}");
        }
    }
}
