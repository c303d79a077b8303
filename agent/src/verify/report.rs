//! The result, as text and as JSON.

use std::fmt;

use serde::Serialize;

use super::{
    look::Look,
    pair::{Functions, Pair, Side},
};

/// The result of a comparison.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Report {
    primary: Named,
    replica: Named,
    pub(super) method: Method,
    pub(super) databases: u32,
    /// The number of the primary's keys that were compared.
    pub(super) keys: u64,
    /// After equal digests: keys of types that digests do not cover, whose values were compared.
    pub(super) beyond_digests: u64,
    pub(super) functions: Functions,
    missing: u64,
    extra: u64,
    other_type: u64,
    other_value: u64,
    other_expiry: u64,
    /// The number of keys that changed every time they were compared.
    pub(super) undecided: u64,
    /// The first of these keys.
    shown: Vec<Difference>,
    pub(super) seconds: f64,
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
pub(super) enum Method {
    /// By equal digests; expiry times were compared one by one, and the values that digests do not cover.
    Digest,
    /// By every value.
    Values,
}

/// How a key differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Kind {
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
pub(super) struct Difference {
    database: u32,
    /// Bytes that are not printable are escaped.
    key: String,
    kind: Kind,
    primary: String,
    replica: String,
}

impl Difference {
    pub(super) fn new(database: u32, key: &[u8], kind: Kind, primary: &Look, replica: &Look) -> Self {
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
    /// An empty report that lists at most `limit` differences.
    pub(super) fn begin(pair: &Pair, limit: u32) -> Self {
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
    pub(super) fn add(&mut self, difference: Difference) {
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
    pub(super) fn differences(&self) -> u64 {
        self.counts().into_iter().map(|(count, _)| count).sum()
    }

    /// Whether anything differs.
    pub(super) fn differs(&self) -> bool {
        self.differences() > 0 || self.functions_differ()
    }

    /// A summary such as `3 keys missing on the replica, 1 with another value`.
    pub(super) fn summary(&self) -> String {
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
    pub(super) fn json(&self) -> String {
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
        let databases = counted(self.databases.into(), "database", "databases");
        format!("{} in {databases}", counted(self.keys, "key", "keys"))
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
    pub(super) fn is_undecided(&self) -> bool {
        self.undecided > 0 || self.undecided_libraries() > 0
    }

    /// The keys and libraries that changed every time: `3 keys`, `3 keys and 1 library`.
    pub(super) fn undecided(&self) -> String {
        let counts = [(self.undecided, "key", "keys"), (self.undecided_libraries() as u64, "library", "libraries")];
        let some = counts.into_iter().filter(|(count, ..)| *count > 0);
        some.map(|(count, one, many)| counted(count, one, many)).collect::<Vec<_>>().join(" and ")
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
                counted(self.beyond_digests, "value", "values")
            ),
            Method::Values => format!("compared {}", self.extent()),
        };
        writeln!(f, "how        {how}, {:.1} s", self.seconds)?;
        match self.functions {
            Functions::Unknown => writeln!(f, "functions  neither server reports them")?,
            Functions::Compared { libraries, same: true, .. } => {
                writeln!(f, "functions  the same ({})", counted(libraries as u64, "library", "libraries"))?;
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

fn counted(count: u64, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}

fn describe(look: &Look) -> String {
    use super::look::Expiry;
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
