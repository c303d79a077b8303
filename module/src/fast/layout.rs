//! Layouts: where exact builds of servers keep what the fast way reads of them. Pure.
//!
//! A layout is a file of `module/builds/`, compiled in: a *listed* build. Or it is a file that `remora module layout`
//! has kept by the build's id: a *found* one, which is tried with more care. The numbers are offsets in bytes, as the
//! compiler of that build chose them. The order of the fields inside of buckets and entries belongs to the family,
//! which the code knows.

use std::collections::BTreeMap;

use remora_layout::Build;
pub(crate) use remora_layout::Family;
use remora_layout::family::{Maker, UnknownVersion};

/// One build.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) family: Family,
    /// The server's version, as INFO reports it.
    pub(crate) version: String,
    /// The SHA-256 of the server's program, hexadecimal.
    pub(crate) sha256: String,
    /// The build's id, in a layout that was found.
    pub(crate) build: Option<String>,
    pub(crate) at: Offsets,
    /// Functions, in bytes from the beginning of the program, where the program does not show them itself.
    pub(crate) functions: BTreeMap<String, usize>,
}

/// The running server.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    pub(crate) maker: Maker,
    /// The version, as INFO reports it.
    pub(crate) version: String,
    /// The SHA-256 of its program, hexadecimal.
    pub(crate) sha256: String,
    pub(crate) build: Build,
}

/// Offsets in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Offsets {
    /// In the server's state: the databases, their number, and the counter of keys that were loaded.
    pub(crate) server_databases: usize,
    pub(crate) server_database_count: usize,
    pub(crate) server_keys_loaded: usize,
    /// The size of a database; 0 if the server keeps pointers to databases.
    pub(crate) database_bytes: usize,
    /// In a database: its keys, its expiring keys, its number.
    pub(crate) database_keys: usize,
    pub(crate) database_expires: usize,
    pub(crate) database_number: usize,
    /// In a store of `dict`s: the address of its tables.
    pub(crate) store_tables: usize,
    /// In a table of keys: two tables, their entries, the position of a rehash, and the exponents of their sizes.
    pub(crate) tables: usize,
    pub(crate) table_used: usize,
    pub(crate) table_rehash: usize,
    pub(crate) table_exponents: usize,
}

/// The builds that are compiled in: every file of that folder.
const BUILDS: [&str; 14] = [
    include_str!("../../builds/redis-7.0.15-debian12-amd64.layout"),
    include_str!("../../builds/redis-7.0.15-debian12-u7-amd64.layout"),
    include_str!("../../builds/redis-8.0.2-debian13-amd64.layout"),
    include_str!("../../builds/redis-8.0.6-debian-sid-amd64.layout"),
    include_str!("../../builds/redis-8.2.3-wheel-amd64.layout"),
    include_str!("../../builds/valkey-8.0.1-debian12-backports-amd64.layout"),
    include_str!("../../builds/valkey-8.1.1-debian13-amd64.layout"),
    include_str!("../../builds/valkey-8.1.8-wheel-amd64.layout"),
    include_str!("../../builds/valkey-9.1.0-wheel-amd64.layout"),
    include_str!("../../builds/valkey-9.1.1-wheel-amd64.layout"),
    include_str!("../../builds/valkey-9.1.2-debian-sid-amd64.layout"),
    include_str!("../../builds/valkey-9.1.2-wheel-amd64.layout"),
    include_str!("../../builds/valkey-9.1.2-wheel-first-amd64.layout"),
    include_str!("../../builds/valkey-9.1.2-wheel-post1-amd64.layout"),
];

/// The line that only layouts of servers with stores of `dict`s have.
const STORE_TABLES: &str = "store.tables";

/// No field that is read lies further than this from the beginning of its structure: a number above it is a slip.
const OFFSET_MAX: usize = 1 << 16;

/// No function lies further than this from the beginning of its program: servers have some ten megabytes.
const FUNCTION_OFFSET_MAX: usize = 1 << 30;

/// What stands before the name of a function.
const FUNCTION: &str = "at.";

impl Layout {
    /// The layout of a listed build.
    pub(crate) fn listed(server: &Identity) -> Result<Layout, LayoutError> {
        let mut built_in = BUILDS.iter().filter_map(|text| Layout::parse(text).ok());
        let known = built_in.find(|layout| layout.version == server.version && layout.sha256 == server.sha256);
        known.ok_or_else(|| LayoutError::Unknown(Box::new(server.clone())))
    }

    /// The layout in a file of the operator's, which must be of this very program.
    pub(crate) fn given(server: &Identity, text: &str) -> Result<Layout, LayoutError> {
        let layout = Layout::parse(text)?.of_the_family(server)?;
        let same = layout.version == server.version && layout.sha256 == server.sha256;
        if same { Ok(layout) } else { Err(LayoutError::Unknown(Box::new(server.clone()))) }
    }

    /// The layout in a file that was found by the build's id, which must be of this build.
    pub(crate) fn found(server: &Identity, text: &str) -> Result<Layout, LayoutError> {
        let layout = Layout::parse(text)?.of_the_family(server)?;
        let is_of = layout.build.as_deref().unwrap_or_default();
        if is_of != server.build.name() {
            return Err(LayoutError::OtherBuild { file: is_of.to_owned(), server: server.build.to_string() });
        }
        if layout.version != server.version {
            return Err(LayoutError::OtherVersion { file: layout.version, server: server.version.clone() });
        }
        Ok(layout)
    }

    fn of_the_family(self, server: &Identity) -> Result<Layout, LayoutError> {
        let family = Family::of_version(server.maker, &server.version)?;
        if self.family == family { Ok(self) } else { Err(LayoutError::Family(self.family.name(), family.name())) }
    }

    fn parse(text: &str) -> Result<Layout, LayoutError> {
        let (mut family, mut version, mut sha256, mut build) = (None, None, None, None);
        let mut functions = BTreeMap::new();
        let mut at = Offsets::default();
        let mut numbers = [
            ("server.db", &mut at.server_databases),
            ("server.dbnum", &mut at.server_database_count),
            ("server.keys_loaded", &mut at.server_keys_loaded),
            ("db.bytes", &mut at.database_bytes),
            ("db.keys", &mut at.database_keys),
            ("db.expires", &mut at.database_expires),
            ("db.id", &mut at.database_number),
            (STORE_TABLES, &mut at.store_tables),
            ("table.tables", &mut at.tables),
            ("table.used", &mut at.table_used),
            ("table.rehash", &mut at.table_rehash),
            ("table.exponents", &mut at.table_exponents),
        ];
        let mut missing: Vec<&str> = numbers.iter().map(|(name, _)| *name).collect();
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
            let invalid = || LayoutError::Line(line.to_owned());
            let (name, value) = line.split_once('=').ok_or_else(invalid)?;
            let (name, value) = (name.trim(), value.trim());
            match name {
                "family" => family = Some(Family::parse(value).ok_or_else(invalid)?),
                "version" => version = Some(value.to_owned()),
                "sha256" => sha256 = Some(value.to_owned()),
                "build" => build = Some(value.to_owned()),
                // Which table had the names: for people.
                "names" => {}
                _ if name.starts_with(FUNCTION) => {
                    let offset = value.parse().ok().filter(|offset| *offset <= FUNCTION_OFFSET_MAX);
                    functions.insert(name[FUNCTION.len()..].to_owned(), offset.ok_or_else(invalid)?);
                }
                _ => {
                    let (_, number) = numbers.iter_mut().find(|(known, _)| *known == name).ok_or_else(invalid)?;
                    **number = value.parse().ok().filter(|offset| *offset <= OFFSET_MAX).ok_or_else(invalid)?;
                    missing.retain(|known| *known != name);
                }
            }
        }
        // Other families have no stores, or a function that knows them.
        missing.retain(|name| *name != STORE_TABLES || family.is_some_and(Family::has_stores_of_dicts));
        if let Some(name) = missing.first() {
            return Err(LayoutError::Missing((*name).to_owned()));
        }
        let absent = |name: &str| LayoutError::Missing(name.to_owned());
        Ok(Layout {
            family: family.ok_or_else(|| absent("family"))?,
            version: version.ok_or_else(|| absent("version"))?,
            sha256: sha256.ok_or_else(|| absent("sha256"))?,
            build,
            at,
            functions,
        })
    }
}

/// Why there is no layout.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LayoutError {
    #[error(
        "this build of the server is not known ({:?} {}, {}, SHA-256 {}): its small values are loaded as without fast \
         keys; `remora module layout --program PATH` finds out where it keeps them",
        .0.maker, .0.version, .0.build, .0.sha256
    )]
    Unknown(Box<Identity>),
    #[error("the layout is of the build {file:?}, and the server is {server}")]
    OtherBuild { file: String, server: String },
    #[error("the layout is of version {file}, and the server is {server}")]
    OtherVersion { file: String, server: String },
    #[error("the layout is of the family {0}, and a server of this version is of {1}")]
    Family(&'static str, &'static str),
    #[error(transparent)]
    Version(#[from] UnknownVersion),
    #[error("the layout file has the line {0:?}, which is not a known name and a valid value")]
    Line(String),
    #[error("the layout file lacks {0}")]
    Missing(String),
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// A server of the build of that file.
    fn server_of(text: &str) -> Identity {
        let layout = Layout::parse(text).unwrap();
        let maker = if layout.family.name().starts_with("redis") { Maker::Redis } else { Maker::Valkey };
        let build = Build::parse("build-id-a50d6825e71f1473").unwrap();
        Identity { maker, version: layout.version, sha256: layout.sha256, build }
    }

    #[test]
    fn every_build_that_is_compiled_in_is_whole_and_found_by_its_name() {
        for text in BUILDS {
            let (layout, server) = (Layout::parse(text).unwrap(), server_of(text));
            assert_eq!(Layout::listed(&server).unwrap(), layout);
            assert_eq!(layout.sha256.len(), 64);
            assert_eq!(Family::of_version(server.maker, &server.version), Ok(layout.family));
            let other = Layout::listed(&Identity { sha256: "0".repeat(64), ..server });
            assert!(matches!(other, Err(LayoutError::Unknown { .. })), "only the version is the same");
        }
    }

    #[test]
    fn every_file_of_a_build_is_compiled_in() {
        for entry in std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/builds")).unwrap() {
            let path = entry.unwrap().path();
            assert!(BUILDS.contains(&&*std::fs::read_to_string(&path).unwrap()), "{} is not", path.display());
        }
    }

    #[test]
    fn a_file_of_the_operators_adds_a_build_and_its_mistakes_are_named() {
        let server = Identity { version: "7.0.99".into(), ..server_of(BUILDS[0]) };
        let text = BUILDS[0].replace("version = 7.0.15", "version = 7.0.99");
        assert_eq!(Layout::given(&server, &text).unwrap().version, "7.0.99");
        assert!(matches!(Layout::given(&server, BUILDS[0]), Err(LayoutError::Unknown { .. })));
        for (from, to, why) in [
            ("db.keys = 0\n", "", "lacks db.keys"),
            ("family = redis-7", "family = redis-6", "redis-6"),
            ("table.used = 24", "table.used = 99999999", "99999999"),
            ("table.used = 24", "table.size = 24", "table.size"),
            ("family = redis-7", "family = valkey-9", "a server of this version is of redis-7"),
        ] {
            let error = Layout::given(&server, &text.replace(from, to)).unwrap_err();
            assert!(error.to_string().contains(why), "{error}");
        }
    }

    #[test]
    fn a_found_layout_is_of_the_build_the_version_and_the_family() {
        let server = server_of(BUILDS[0]);
        let text = format!("{}build = {}\nnames = symbols\nat.sdsfree = 4096\n", BUILDS[0], server.build);
        let layout = Layout::found(&server, &text).unwrap();
        assert_eq!(layout.functions["sdsfree"], 4096);
        let refused = |server: &Identity, text: &str, why: &str| {
            let error = Layout::found(server, text).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        };
        refused(&server, BUILDS[0], "the layout is of the build \"\"");
        refused(&server, &text.replace("build-id-a", "build-id-b"), "build-id-b50d");
        refused(&server, &text.replace("4096", "99999999999"), "at.sdsfree = 99999999999");
        refused(&server, &text.replace("4096", "-1"), "at.sdsfree = -1");
        refused(&Identity { version: "7.0.14".into(), ..server.clone() }, &text, "the layout is of version 7.0.15");
        let newer = Identity { maker: Maker::Valkey, version: "9.2.0".into(), ..server };
        refused(&newer, &text.replace("version = 7.0.15", "version = 9.2.0"), "Valkey 9.2.0 is not known");
    }
}
