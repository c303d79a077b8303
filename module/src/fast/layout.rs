//! Layouts: where exact builds of servers keep what the fast way reads of them. Pure.
//!
//! A layout is a file of `module/builds/`, compiled in. To support a build is to add its file. The numbers are offsets
//! in bytes, as the compiler of that build chose them; `xtask layout` finds them. The order of the fields
//! inside of buckets and entries belongs to the family, which the code knows.

/// What a build's calls and tables are like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    /// Redis 7: a `dict` of entries for each database.
    Redis7,
    /// Redis 8.0: a store of `dict`s for each database, of which outside of cluster mode there is one.
    Redis8,
    /// Valkey 8.0: as Redis 8.0, but entries have their keys inside.
    Valkey80,
    /// Valkey 8.1: as Valkey 9, but databases lie in an array, and some functions are those of Redis 7.
    Valkey8,
    /// Valkey 9: a `hashtable` of objects with embedded keys.
    Valkey9,
}

/// One build.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) family: Family,
    /// The server's version, as INFO reports it.
    pub(crate) version: String,
    /// The SHA-256 of the server's program, hexadecimal.
    pub(crate) sha256: String,
    pub(crate) at: Offsets,
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
const BUILDS: [&str; 13] = [
    include_str!("../../builds/redis-7.0.15-debian12-amd64.layout"),
    include_str!("../../builds/redis-7.0.15-debian12-u7-amd64.layout"),
    include_str!("../../builds/redis-8.0.2-debian13-amd64.layout"),
    include_str!("../../builds/redis-8.0.6-debian-sid-amd64.layout"),
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

impl Layout {
    /// The layout of the build with that version and that SHA-256. `more`: a file of the operator's.
    pub(crate) fn find(version: &str, sha256: &str, more: Option<&str>) -> Result<Layout, LayoutError> {
        let own = more.map(Layout::parse).transpose()?;
        let built_in = BUILDS.iter().filter_map(|text| Layout::parse(text).ok());
        let known = own.into_iter().chain(built_in).find(|layout| layout.version == version && layout.sha256 == sha256);
        known.ok_or_else(|| LayoutError::Unknown { version: version.to_owned(), sha256: sha256.to_owned() })
    }

    fn parse(text: &str) -> Result<Layout, LayoutError> {
        let (mut family, mut version, mut sha256) = (None, None, None);
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
                _ => {
                    let (_, number) = numbers.iter_mut().find(|(known, _)| *known == name).ok_or_else(invalid)?;
                    **number = value.parse().ok().filter(|offset| *offset <= OFFSET_MAX).ok_or_else(invalid)?;
                    missing.retain(|known| *known != name);
                }
            }
        }
        // Other families have no stores, or a function that knows them.
        missing.retain(|name| *name != STORE_TABLES || matches!(family, Some(Family::Redis8 | Family::Valkey80)));
        if let Some(name) = missing.first() {
            return Err(LayoutError::Missing((*name).to_owned()));
        }
        let absent = |name: &str| LayoutError::Missing(name.to_owned());
        Ok(Layout {
            family: family.ok_or_else(|| absent("family"))?,
            version: version.ok_or_else(|| absent("version"))?,
            sha256: sha256.ok_or_else(|| absent("sha256"))?,
            at,
        })
    }
}

impl Family {
    fn parse(name: &str) -> Option<Family> {
        match name {
            "redis-7" => Some(Family::Redis7),
            "redis-8.0" => Some(Family::Redis8),
            "valkey-8.0" => Some(Family::Valkey80),
            "valkey-8.1" => Some(Family::Valkey8),
            "valkey-9" => Some(Family::Valkey9),
            _ => None,
        }
    }
}

/// Why there is no layout.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum LayoutError {
    #[error(
        "this build of the server is not known (version {version}, SHA-256 {sha256}): its small values are loaded as \
         without fast keys; docs/explanation/module.md says how to add a build"
    )]
    Unknown { version: String, sha256: String },
    #[error("the layout file has the line {0:?}, which is not a known name and a valid value")]
    Line(String),
    #[error("the layout file lacks {0}")]
    Missing(String),
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn every_build_that_is_compiled_in_is_whole_and_found_by_its_name() {
        for text in BUILDS {
            let layout = Layout::parse(text).unwrap();
            assert_eq!(Layout::find(&layout.version, &layout.sha256, None), Ok(layout.clone()));
            assert_eq!(layout.sha256.len(), 64);
            let other = Layout::find(&layout.version, &"0".repeat(64), None);
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
        let text = BUILDS[0].replace("version = 7.0.15", "version = 7.0.99");
        let sha256 = Layout::parse(BUILDS[0]).unwrap().sha256;
        assert_eq!(Layout::find("7.0.99", &sha256, Some(&text)).unwrap().version, "7.0.99");
        for (from, to, why) in [
            ("db.keys = 0\n", "", "lacks db.keys"),
            ("family = redis-7", "family = redis-6", "redis-6"),
            ("table.used = 24", "table.used = 99999999", "99999999"),
            ("table.used = 24", "table.size = 24", "table.size"),
        ] {
            let error = Layout::find("7.0.15", &sha256, Some(&BUILDS[0].replace(from, to))).unwrap_err();
            assert!(error.to_string().contains(why), "{error}");
        }
    }
}
