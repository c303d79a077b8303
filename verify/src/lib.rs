//! Verify: tells whether two servers hold the same data, and what differs.
//!
//! ```text
//!            digests, if both are idle and allow it ──equal──▶ left to read: expiry times, streams, modules' types
//!                 │ no                                                     │
//!   scan ──▶ every key of the primary: DUMP and expiry on both ──same──▶ done with it
//!                 │ other bytes                                            ▲
//!                 ├──▶ by content (look) ──same────────────────────────────┤
//!                 ▼ other content                                          │
//!             suspects ──▶ recheck: primary, wait for the replica, replica, primary again ──▶ differs, or undecided
//!                 ▲
//!   scan ──▶ every key of the replica that the primary lacks
//! ```
//!
//! Clients may write to both servers meanwhile. So a difference that is seen once proves nothing, and equality at any
//! moment proves enough. A key counts as different only if the replica, having caught up with a value that the primary
//! still has, holds another one.
//!
//! Memory: one group of values at a time (`scan` says how large), and the names of some thousand suspects. It writes
//! nothing to either server.
//!
//! [`compare`] is all that a program needs. The crate knows no command line.
#![forbid(unsafe_code)]
// The docs name private items: read them in the source, or with `--document-private-items`.
#![allow(rustdoc::private_intra_doc_links)]

mod look;
mod pair;
mod scan;

use std::fmt;
use std::time::{Duration, Instant};

use serde::Serialize;

use self::look::Look;
use self::pair::{Functions, Pair, Side};
use self::scan::Scan;
use remora_base::units::counted;
use remora_process::exit::{Code, Failure};
use remora_process::exit::{Patience, RETRY_FOR};
use remora_process::progress::{Meter, Unit};
use remora_server::{Facts, Login, ServerError, Task};

/// Which servers are compared, and how.
#[derive(Clone, Debug)]
pub struct Options {
    /// The server to compare with.
    pub primary: Login,
    /// The server that is checked.
    pub replica: Login,
    /// Compare `DEBUG DIGEST` of both first, if they allow it. A server answers no other client while it computes it.
    pub may_digest: bool,
    /// How often what differs is compared again, each time after the replica has caught up: at least once.
    pub recheck: u32,
    /// How many differences the report lists. All are counted.
    pub limit: u32,
    /// How long a server that does not answer is tried again. Zero: it is tried once.
    pub retry_for: Duration,
}

/// Compares the two servers to the end, whatever comes out.
///
/// # Errors
/// One of the servers does not answer, or they cannot be compared.
pub async fn compare(options: &Options) -> Result<Report, Failure> {
    let begun = Instant::now();
    let mut patience = Patience::new(options.retry_for, RETRY_FOR);
    let mut report = loop {
        match compared(options).await {
            Ok(report) => break report,
            // Nothing was changed: the comparison begins anew.
            Err(failure) => tokio::time::sleep(patience.after(Instant::now(), failure)?).await,
        }
    };
    report.seconds = begun.elapsed().as_secs_f64();
    Ok(report)
}

/// Connects to both servers and compares them once.
async fn compared(options: &Options) -> Result<Report, Failure> {
    let (primary, replica) = (options.primary.open(Task::Verify)?, options.replica.open(Task::Verify)?);
    let (primary, replica) = tokio::try_join!(Side::open(&primary), Side::open(&replica))?;
    let mut pair = Pair::new(primary, replica);
    refuse_itself(&pair)?;
    refuse_to_compare_too_early(&pair)?;
    let mut report = Report::begin(&pair, options.limit);
    compare_once(&mut pair, options, &mut report).await?;
    Ok(report)
}

async fn compare_once(pair: &mut Pair, options: &Options, report: &mut Report) -> Result<(), ServerError> {
    report.functions = pair.compare_functions(options.recheck).await?;
    report.method = match options.may_digest {
        true if digests_agree(pair).await? => Method::Digest,
        _ => Method::Values,
    };
    let databases = databases_of(&pair.primary.facts, &pair.replica.facts);
    let meter = Meter::start("verify", Unit::Count("key"), Some(keys_to_scan(pair, &databases, report.method)));
    let mut scan = Scan::new(pair, report, &meter, options.recheck);
    for database in databases {
        scan.database(database).await?;
    }
    scan.finish().await?;
    meter.finish();
    Ok(())
}

/// Asks both servers for a digest of all data. False also if one of them does not allow it or is being written to.
async fn digests_agree(pair: &mut Pair) -> Result<bool, ServerError> {
    // A digest tells whether a key expires, but not when, nor which fields of a hash do. The scan compares the former,
    // and with the latter every hash would have to be read: that is a comparison by values.
    let has_expiring_fields = |facts: &Facts| facts.databases.iter().any(|database| database.field_expires > 0);
    if has_expiring_fields(&pair.primary.facts) || has_expiring_fields(&pair.replica.facts) || !pair.is_quiet().await? {
        return Ok(false);
    }
    pair.catch_up().await?;
    let (one, other) = tokio::try_join!(pair.primary.digest(DIGEST_LIMIT), pair.replica.digest(DIGEST_LIMIT))?;
    Ok(one.is_some() && one == other)
}

/// The databases to scan: all that hold a key on either side.
fn databases_of(primary: &Facts, replica: &Facts) -> Vec<u32> {
    let mut numbers: Vec<_> = primary.databases.iter().chain(&replica.databases).map(|held| held.number).collect();
    numbers.sort_unstable();
    numbers.dedup();
    numbers
}

/// The number of keys that the scan will pass: those of both sides, or after equal digests those of the primary.
fn keys_to_scan(pair: &Pair, databases: &[u32], method: Method) -> u64 {
    let keys = |facts: &Facts| {
        let scanned = facts.databases.iter().filter(|database| databases.contains(&database.number));
        scanned.map(|database| database.keys).fold(0, u64::saturating_add)
    };
    match method {
        Method::Digest => keys(&pair.primary.facts),
        Method::Values => keys(&pair.primary.facts).saturating_add(keys(&pair.replica.facts)),
    }
}

fn refuse_itself(pair: &Pair) -> Result<(), Failure> {
    match (&pair.primary.facts.run_id, &pair.replica.facts.run_id) {
        (Some(one), Some(other)) if one == other => Err(Failure::refused(format!(
            "{} and {} are the same server (run_id {one}): there is nothing to compare",
            pair.primary.url(),
            pair.replica.url()
        ))),
        _ => Ok(()),
    }
}

/// A server that loads shows a part of its data.
fn refuse_to_compare_too_early(pair: &Pair) -> Result<(), Failure> {
    match [&pair.primary, &pair.replica].into_iter().find(|side| side.facts.loading == Some(true)) {
        Some(side) => {
            let text = format!("the server {} is loading its data set (-LOADING)", side.url());
            Err(Failure::passing(Code::Server, text))
        }
        None => Ok(()),
    }
}

/// The time limit of a digest. A server computes it at some hundred megabytes, or half a million elements, per second:
/// this is enough for the largest servers in use.
const DIGEST_LIMIT: Duration = Duration::from_secs(1800);

// The result, as text and as JSON.

/// The result of a comparison.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    primary: Named,
    replica: Named,
    method: Method,
    databases: u32,
    /// The number of the primary's keys that were compared.
    keys: u64,
    /// After equal digests: keys of types that digests do not cover, whose values were compared.
    beyond_digests: u64,
    functions: Functions,
    missing: u64,
    extra: u64,
    other_type: u64,
    other_value: u64,
    other_expiry: u64,
    /// The number of keys that changed every time they were compared.
    undecided: u64,
    /// The first of these keys.
    shown: Vec<Difference>,
    seconds: f64,
    #[serde(skip)]
    limit: usize,
}

#[derive(Clone, Debug, Serialize)]
struct Named {
    url: String,
    server: String,
    offset: Option<u64>,
}

/// How values were compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Method {
    /// By equal digests; expiry times were compared one by one, and the values that digests do not cover.
    Digest,
    /// By every value.
    Values,
}

/// How a key differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    /// The replica does not have it.
    Missing,
    /// Only the replica has it.
    Extra,
    Type,
    Value,
    Expiry,
}

/// One key that differs.
#[derive(Clone, Debug, Serialize)]
struct Difference {
    database: u32,
    /// Bytes that are not printable are escaped.
    key: String,
    kind: Kind,
    primary: String,
    replica: String,
}

impl Difference {
    fn new(database: u32, key: &[u8], kind: Kind, primary: &Look, replica: &Look) -> Self {
        Self {
            database,
            key: key.escape_ascii().to_string(),
            kind,
            primary: describe(primary),
            replica: describe(replica),
        }
    }
}

impl Report {
    /// Whether the servers hold the same.
    ///
    /// # Errors
    /// They differ, or it could not be decided.
    pub fn verdict(&self) -> Result<(), Failure> {
        if self.differs() {
            return Err(Failure::new(Code::Differs, format!("the servers differ: {}", self.summary())));
        }
        if self.is_undecided() {
            let text = format!(
                "{} changed faster than they could be compared, all others are the same; try again when they are written to less, \
                 or with a larger --recheck",
                self.undecided()
            );
            return Err(Failure::new(Code::Undecided, text));
        }
        Ok(())
    }

    /// The number of the primary's keys that were compared.
    pub fn keys(&self) -> u64 {
        self.keys
    }

    /// An empty report that lists at most `limit` differences.
    fn begin(pair: &Pair, limit: u32) -> Self {
        Self {
            primary: Named::of(&pair.primary),
            replica: Named::of(&pair.replica),
            method: Method::Values,
            databases: 0,
            keys: 0,
            beyond_digests: 0,
            functions: Functions::Unknown,
            missing: 0,
            extra: 0,
            other_type: 0,
            other_value: 0,
            other_expiry: 0,
            undecided: 0,
            shown: Vec::new(),
            seconds: 0.0,
            limit: usize::try_from(limit).unwrap_or(usize::MAX),
        }
    }

    /// Counts a difference, and lists it if there is room.
    fn add(&mut self, difference: Difference) {
        let count = match difference.kind {
            Kind::Missing => &mut self.missing,
            Kind::Extra => &mut self.extra,
            Kind::Type => &mut self.other_type,
            Kind::Value => &mut self.other_value,
            Kind::Expiry => &mut self.other_expiry,
        };
        *count += 1;
        if self.shown.len() < self.limit {
            self.shown.push(difference);
        }
    }

    /// The number of keys that differ.
    fn differences(&self) -> u64 {
        self.counts().into_iter().map(|(count, _)| count).sum()
    }

    /// Whether anything differs.
    fn differs(&self) -> bool {
        self.differences() > 0 || self.functions_differ()
    }

    /// A summary such as `3 keys missing on the replica, 1 with another value`.
    fn summary(&self) -> String {
        let counts = self.counts().into_iter().filter(|(count, _)| *count > 0);
        let mut parts: Vec<_> = counts.map(|(count, what)| format!("{count} {what}")).collect();
        if self.functions_differ() {
            parts.push("other functions".into());
        }
        if self.is_undecided() {
            parts.push(format!("{} undecided", self.undecided()));
        }
        parts.join(", ")
    }

    /// The report as one JSON object.
    pub fn json(&self) -> String {
        #[derive(Serialize)]
        struct Whole<'a> {
            same: bool,
            #[serde(flatten)]
            report: &'a Report,
        }
        let whole = Whole { same: !self.differs() && !self.is_undecided(), report: self };
        // Strings, numbers and lists of them can always be serialized.
        serde_json::to_string_pretty(&whole).unwrap_or_default()
    }

    fn extent(&self) -> String {
        let databases = counted(self.databases, "database");
        format!("{} in {databases}", counted(self.keys, "key"))
    }

    fn counts(&self) -> [(u64, &'static str); 5] {
        [
            (self.missing, "missing on the replica"),
            (self.extra, "only on the replica"),
            (self.other_type, "of another type"),
            (self.other_value, "with another value"),
            (self.other_expiry, "with another expiry"),
        ]
    }

    /// Whether a key or library changed every time it was compared.
    fn is_undecided(&self) -> bool {
        self.undecided > 0 || self.undecided_libraries() > 0
    }

    /// The keys and libraries that changed every time: `3 keys`, `3 keys and 1 library`.
    fn undecided(&self) -> String {
        let counts = [(self.undecided, "key"), (self.undecided_libraries() as u64, "library")];
        let some = counts.into_iter().filter(|(count, _)| *count > 0);
        some.map(|(count, one)| counted(count, one)).collect::<Vec<_>>().join(" and ")
    }

    fn undecided_libraries(&self) -> usize {
        match self.functions {
            Functions::Compared { undecided, .. } => undecided,
            Functions::Unknown => 0,
        }
    }

    fn functions_differ(&self) -> bool {
        matches!(self.functions, Functions::Compared { same: false, .. })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "primary    {}", self.primary)?;
        writeln!(f, "replica    {}", self.replica)?;
        let how = match self.method {
            Method::Digest => format!(
                "the digests are equal; compared the expiry of {}, and {} of types that digests do not cover",
                self.extent(),
                counted(self.beyond_digests, "value")
            ),
            Method::Values => format!("compared {}", self.extent()),
        };
        writeln!(f, "how        {how}, {:.1} s", self.seconds)?;
        match self.functions {
            Functions::Unknown => writeln!(f, "functions  neither server reports them")?,
            Functions::Compared { libraries, same: true, .. } => {
                writeln!(f, "functions  the same ({})", counted(libraries, "library"))?;
            }
            Functions::Compared { same: false, .. } => writeln!(f, "functions  different")?,
        }
        match self.differs() || self.is_undecided() {
            false => writeln!(f, "result     the same")?,
            true => writeln!(f, "result     {}", self.summary())?,
        }
        for difference in &self.shown {
            writeln!(f, "  {difference}")?;
        }
        match self.differences() - self.shown.len() as u64 {
            0 => Ok(()),
            more => writeln!(f, "  … and {more} more"),
        }
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { database, key, kind, primary, replica } = self;
        write!(f, "db{database} \"{key}\"  ")?;
        match kind {
            Kind::Missing => write!(f, "missing on the replica ({primary} on the primary)"),
            Kind::Extra => write!(f, "only on the replica ({replica})"),
            Kind::Type | Kind::Expiry => {
                write!(f, "{primary} on the primary, {replica} on the replica")
            }
            Kind::Value => write!(f, "another value ({primary})"),
        }
    }
}

impl Named {
    fn of(side: &Side) -> Self {
        Self { url: side.url().to_string(), server: side.facts.name(), offset: side.facts.offset }
    }
}

impl fmt::Display for Named {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}  {}", self.url, self.server)?;
        match self.offset {
            Some(offset) => write!(f, "  offset {offset}"),
            None => Ok(()),
        }
    }
}

fn describe(look: &Look) -> String {
    use self::look::Expiry;
    match look {
        Look::Absent => "absent".into(),
        Look::Changing => "changing".into(),
        Look::Present { kind, expiry, .. } => match expiry {
            Expiry::NoKey | Expiry::Never => kind.clone(),
            Expiry::At(at) => format!("{kind} that expires at {at}"),
            Expiry::About(at) => format!("{kind} that expires at about {at}"),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use remora_server::Database;

    fn facts(databases: &[u32]) -> Facts {
        let databases = databases.iter();
        let databases = databases.map(|number| Database { number: *number, keys: 1, expires: 0, field_expires: 0 });
        Facts { databases: databases.collect(), ..Facts::default() }
    }

    #[test]
    fn databases_of_either_side_are_gone_through_once() {
        assert_eq!(databases_of(&facts(&[0, 3]), &facts(&[0, 7])), [0, 3, 7]);
    }
}
