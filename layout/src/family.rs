//! Families: servers whose tables are alike, and whose functions take the same arguments.

// Stands alone: the list of what the module has code for.

/// What a build's calls and tables are like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Redis 7: a `dict` of entries for each database.
    Redis7,
    /// Redis 7.4 and 8.0: a store of `dict`s for each database, of which outside of cluster mode there is one.
    Redis8,
    /// Redis 8.2: as Redis 8.0, but values have their keys inside.
    Redis82,
    /// Valkey 8.0: as Redis 8.0, but entries have their keys inside.
    Valkey80,
    /// Valkey 8.1: as Valkey 9, but databases lie in an array, and some functions are those of Redis 7.
    Valkey8,
    /// Valkey 9: a `hashtable` of objects with embedded keys.
    Valkey9,
}

/// The versions of each family.
const VERSIONS: [(Maker, u32, u32, Family); 10] = [
    (Maker::Redis, 7, 0, Family::Redis7),
    (Maker::Redis, 7, 2, Family::Redis7),
    (Maker::Redis, 7, 4, Family::Redis8),
    (Maker::Redis, 8, 0, Family::Redis8),
    (Maker::Redis, 8, 2, Family::Redis82),
    (Maker::Valkey, 7, 2, Family::Redis7),
    (Maker::Valkey, 8, 0, Family::Valkey80),
    (Maker::Valkey, 8, 1, Family::Valkey8),
    (Maker::Valkey, 9, 0, Family::Valkey9),
    (Maker::Valkey, 9, 1, Family::Valkey9),
];

/// Whose server it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Maker {
    /// Redis, and servers that call themselves so.
    Redis,
    /// Valkey.
    Valkey,
}

/// The functions that the module calls in every family, and the server's state.
const COMMON: [&str; 7] = [
    "server",
    "sdsnewlen",
    "sdsfree",
    "createStringObject",
    "createRawStringObject",
    "createStringObjectFromLongLongForValue",
    "decrRefCount",
];

/// The functions of servers whose tables are `dict`s.
const DICTS: [&str; 10] = [
    "dictGenHashFunction",
    "dbAddRDBLoad",
    "setExpire",
    "objectSetLRUOrLFU",
    "LRU_CLOCK",
    "estimateObjectIdleTime",
    "LFUDecrAndReturn",
    "rdbLoadObject",
    "rdbSaveObjectType",
    "rdbSaveObject",
];

/// The functions of Valkey from 8.1 on.
const HASHTABLES: [&str; 12] = [
    "tryObjectEncodingEx",
    "hashtableGenHashFunction",
    "kvstoreGetHashtable",
    "sdscpylen",
    "incrRefCount",
    "dbAddRDBLoad",
    "setExpire",
    "objectGetKey",
    "objectGetExpire",
    "objectSetLRUOrLFU",
    "rdbLoadObject",
    "rdbSaveObject",
];

impl Family {
    /// Every family.
    pub const ALL: [Family; 6] =
        [Family::Redis7, Family::Redis8, Family::Redis82, Family::Valkey80, Family::Valkey8, Family::Valkey9];

    /// Its name in a layout.
    pub fn name(self) -> &'static str {
        match self {
            Family::Redis7 => "redis-7",
            Family::Redis8 => "redis-8.0",
            Family::Redis82 => "redis-8.2",
            Family::Valkey80 => "valkey-8.0",
            Family::Valkey8 => "valkey-8.1",
            Family::Valkey9 => "valkey-9",
        }
    }

    /// The family of that name.
    pub fn parse(name: &str) -> Option<Family> {
        Family::ALL.into_iter().find(|family| family.name() == name)
    }

    /// The family of a server by its maker and its version, as INFO reports them.
    ///
    /// # Errors
    /// The version is of no family that this release knows: what it has in its memory was never compared.
    pub fn of_version(maker: Maker, version: &str) -> Result<Family, UnknownVersion> {
        let mut numbers = version.split('.').map(|number| number.parse::<u32>().ok());
        let (major, minor) = (numbers.next().flatten(), numbers.next().flatten());
        let known = VERSIONS.iter().find(|known| known.0 == maker && (Some(known.1), Some(known.2)) == (major, minor));
        known.map(|known| known.3).ok_or_else(|| UnknownVersion { maker, version: version.to_owned() })
    }

    /// The family by what a program shows: `has` says whether it has a function of that name.
    pub fn of_functions(has: impl Fn(&str) -> bool) -> Option<Family> {
        if has("kvstoreGetHashtable") {
            return Some(if has("objectGetVal") { Family::Valkey9 } else { Family::Valkey8 });
        }
        let (has_stores, embeds_keys) = (has("kvstoreCreate"), has("dictSdsEmbedKey"));
        // Redis 8.2 has keys in values; later versions have more beside them.
        let in_values = (has("kvobjGetKey"), has("kvobjMetaRef"));
        match (has("dictGenHashFunction"), has_stores, embeds_keys, in_values) {
            (true, false, ..) => Some(Family::Redis7),
            (true, true, true, _) => Some(Family::Valkey80),
            (true, true, false, (false, _)) => Some(Family::Redis8),
            (true, true, false, (true, false)) => Some(Family::Redis82),
            _ => None,
        }
    }

    /// Whether a database has stores of `dict`s, of whose tables a layout has the place.
    pub fn has_stores_of_dicts(self) -> bool {
        matches!(self, Family::Redis8 | Family::Redis82 | Family::Valkey80)
    }

    /// The names of the functions, and of the state, that the module uses in this family.
    pub fn functions(self) -> Vec<&'static str> {
        let eight = ["LRU_CLOCK", "estimateObjectIdleTime", "LFUDecrAndReturn", "rdbSaveObjectType"];
        let nine = ["objectGetVal", "objectGetLRUIdleSecs", "objectGetLFUFrequency", "rdbGetObjectType"];
        let own: Vec<&str> = match self {
            Family::Redis7 => [&DICTS[..], &["dictFind", "tryObjectEncoding"]].concat(),
            Family::Redis8 | Family::Valkey80 => [&DICTS[..], &["dictFind", "tryObjectEncodingEx"]].concat(),
            Family::Redis82 => [&DICTS[..], &["tryObjectEncodingEx", "kvobjGetKey", "kvobjGetExpire"]].concat(),
            Family::Valkey8 => [&HASHTABLES[..], &eight].concat(),
            Family::Valkey9 => [&HASHTABLES[..], &nine].concat(),
        };
        [&COMMON[..], &own].concat()
    }
}

/// A version that is of no family.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{maker:?} {version} is not known to this release, whose fast keys know {}: its tables may be others", known())]
pub struct UnknownVersion {
    /// Whose server it is.
    pub maker: Maker,
    /// Its version.
    pub version: String,
}

fn known() -> String {
    VERSIONS.map(|(maker, major, minor, _)| format!("{maker:?} {major}.{minor}")).join(", ")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_version_that_nobody_has_compared_is_refused_by_its_name() {
        assert_eq!(Family::of_version(Maker::Valkey, "9.1.2"), Ok(Family::Valkey9));
        assert_eq!(Family::of_version(Maker::Redis, "7.2.6"), Ok(Family::Redis7));
        assert_eq!(Family::of_version(Maker::Redis, "8.2.3"), Ok(Family::Redis82));
        for (maker, version) in [
            (Maker::Valkey, "9.2.0"),
            (Maker::Valkey, "7.0.15"),
            (Maker::Redis, "8.4.0"),
            (Maker::Redis, "7.3.6"),
            (Maker::Redis, "255.255.255"),
            (Maker::Redis, ""),
            (Maker::Redis, "9"),
        ] {
            let error = Family::of_version(maker, version).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{maker:?} {version} is not known")), "{error}");
            assert!(error.contains("Valkey 9.1"), "{error}");
        }
    }

    #[test]
    fn families_have_names_and_no_function_twice() {
        for family in Family::ALL {
            assert_eq!(Family::parse(family.name()), Some(family));
            let mut functions = family.functions();
            let all = functions.len();
            functions.sort_unstable();
            functions.dedup();
            assert_eq!(functions.len(), all, "{family:?}");
            assert!(functions.contains(&"server"));
        }
        assert_eq!(Family::parse("redis-6"), None);
    }
}
