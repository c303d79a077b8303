//! The shapes of the server's functions: each is called with known arguments, and must return what its name says. A
//! build whose function takes other arguments than its family's is found here by that function's name, by a difference
//! or by a crash of the child.

use remora_redis::rdb::{COLLECTION_TYPES, Collection, Usage};

use crate::api::{Adding, Context, FastServer, KeyKind, OwnedStr, Shape, Steps};

/// A name that no key has.
const NAME: &[u8] = b"remora: the shapes of the server's functions: 5e0c1f7a";

/// A time after which no check runs: 2100-01-01, in milliseconds since 1970.
const FAR_MS: u64 = 4_102_444_800_000;

/// Seconds of idleness, and the counter of uses, that are set and read. The servers' clocks for ages have seconds, and
/// ages that are written as they are read may be one off.
const IDLE_SECONDS: u64 = 5000;
const IDLE_SLACK: u64 = 3;
const USES: u8 = 77;

/// Lengths of strings, for each size of their heads.
const LENGTHS: [usize; 6] = [0, 5, 31, 100, 300, 70_000];

/// `OBJ_STRING`, and its encodings as bytes of their own, as a number and inside of the object.
const STRING: u8 = 0;
const RAW: u8 = 0;
const NUMBER: u8 = 1;
const EMBEDDED: u8 = 8;

/// Calls each function in this child. The data of the server may be there.
pub(super) fn check(context: &Context<'_>, server: &FastServer, steps: &Steps) -> Result<(), String> {
    let checking = Checking { context, server, steps };
    checking.strings()?;
    checking.hash()?;
    checking.values()?;
    checking.one_key()
}

struct Checking<'c> {
    context: &'c Context<'c>,
    server: &'c FastServer,
    steps: &'c Steps,
}

impl Checking<'_> {
    /// Says what is called next, for the message about a crash there.
    fn calls<T>(&self, names: &str, call: impl FnOnce() -> T) -> T {
        self.steps.begin(names);
        call()
    }

    fn strings(&self) -> Result<(), String> {
        for length in LENGTHS {
            let text: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
            let (has, ends) = self.calls("sdsnewlen", || self.server.try_sds(&text));
            is("sdsnewlen", has == text && ends)?;
            let copied = self.calls("sdscpylen", || self.server.try_copy(b"what was there before", &text));
            is("sdscpylen", copied.is_none_or(|copied| copied == text))?;
            let shape = self.calls("createRawStringObject", || self.server.try_string(&text, true));
            is("createRawStringObject", shape == string(RAW, &text))?;
            let shape = self.calls("createStringObject", || self.server.try_string(&text, false));
            let encoding = if length < 44 { EMBEDDED } else { shape.encoding };
            is("createStringObject", shape == string(encoding, &text) && [RAW, EMBEDDED].contains(&encoding))?;
        }
        for number in [0, 7, -7, 123_456_789, i32::MIN] {
            let shape = self.calls("createStringObjectFromLongLongForValue", || self.server.try_number(number));
            is("createStringObjectFromLongLongForValue", shape == string(NUMBER, number.to_string().as_bytes()))?;
        }
        for (text, encoding) in [("12345678901", NUMBER), ("-5", NUMBER), ("007", EMBEDDED), ("a text", EMBEDDED)] {
            let shape = self.calls("tryObjectEncoding", || self.server.try_encoded(text.as_bytes()));
            is("tryObjectEncoding", shape == string(encoding, text.as_bytes()))?;
        }
        let references = self.calls("incrRefCount", || self.server.try_references());
        is("incrRefCount", references.is_none_or(|[made, retained, released]| made != retained && made == released))
    }

    fn hash(&self) -> Result<(), String> {
        let hash = |bytes: &[u8]| self.calls("the hash function", || self.server.try_hash(bytes));
        let (whole, three) = (hash(b"abcdef"), hash(&b"abcdef"[..3]));
        // Of the bytes that it was given, and of no other.
        let depends = three == hash(&b"abcxyz"[..3]) && three != whole && whole == hash(b"abcdef");
        let many: std::collections::BTreeSet<u64> = (0..64_u8).map(|byte| hash(&[byte; 40]) & 0xFFFF).collect();
        is("the hash function", depends && many.len() > 48)
    }

    /// Values of each type of collection, as the server's own `DUMP` shows them.
    fn values(&self) -> Result<(), String> {
        let name = b"remora: a value for the functions of one value: 5e0c1f7a".as_slice();
        // Values are taken from the replies to DUMP. A setting of this child only.
        self.command("CONFIG", &[b"SET", b"rdbcompression", b"no"])?;
        for words in [
            [b"HSET".as_slice(), name, b"field", b"value"].as_slice(),
            &[b"RPUSH", name, b"one", b"2"],
            &[b"SADD", name, b"1", b"70000"],
            // Two in one bucket of a table would change places.
            &[b"SADD", name, b"one"],
            &[b"ZADD", name, b"1.5", b"one"],
        ] {
            self.command("DEL", &[name])?;
            let (command, arguments) = words.split_first().ok_or("no command")?;
            self.command(&String::from_utf8_lossy(command), arguments)?;
            let dump = self.command("DUMP", &[name])?;
            let (value, footer) = dump.split_at_checked(dump.len().saturating_sub(FOOTER_BYTES)).ok_or(SHORT)?;
            let (kind, bytes) = value.split_first().ok_or(SHORT)?;
            let version = footer.first_chunk().map(|bytes| u16::from_le_bytes(*bytes)).ok_or(SHORT)?;
            if !COLLECTION_TYPES.contains(kind) {
                return Err(format!("the server dumps a value as type {kind}, which no family of its version does"));
            }
            let functions = "rdbLoadObject, rdbSaveObject and the function of a value's type";
            let again = self.calls(functions, || self.server.try_value(&Collection { kind: *kind, bytes }, version));
            let (_, saved_kind, saved) = again.ok_or_else(|| differs(functions))?;
            is(functions, saved_kind == *kind && saved == bytes)?;
        }
        self.command("DEL", &[name]).map(drop)
    }

    /// One key: added, found in its bucket, refused a second time, with an expiry and an age.
    fn one_key(&self) -> Result<(), String> {
        let adding = Adding { database: 0, key: NAME };
        self.context.select(0);
        let before = self.context.key_count();
        let added = self.calls("dbAddRDBLoad", || self.server.try_add(self.context, &adding, b"value"));
        is("dbAddRDBLoad", added == Some(true) && self.context.key_count() == before + 1)?;
        let again = self.calls("dbAddRDBLoad", || self.server.try_add(self.context, &adding, b"other"));
        is("dbAddRDBLoad", again == Some(false) && self.context.key_count() == before + 1)?;
        is("dbAddRDBLoad", self.by_the_api() == Some((b"value".to_vec(), None)))?;
        let found = self.calls("the table's functions", || self.server.try_find(&adding));
        is("the table's functions", found.is_some_and(|shape| shape.text.as_deref() == Some(b"value")))?;
        is("the function for an expiry", self.calls("an expiry", || self.server.try_expiry(&adding)).is_none())?;
        self.calls("setExpire", || self.server.try_expire(&adding, FAR_MS));
        is("setExpire", self.by_the_api() == Some((b"value".to_vec(), Some(FAR_MS))))?;
        let expiry = self.calls("the function for an expiry", || self.server.try_expiry(&adding));
        is("the function for an expiry", expiry == i64::try_from(FAR_MS).ok())?;
        let unknown = Adding { database: 0, key: b"remora: a name that no key has: 5e0c1f7a" };
        is(
            "the table's functions",
            self.calls("a key that is not there", || self.server.try_find(&unknown)).is_none(),
        )?;
        self.usage(&adding)?;
        is("dbAddRDBLoad", self.command("DEL", &[NAME])? == b"1" && self.context.key_count() == before)
    }

    /// The key's age, or its counter of uses: what the server's policy keeps. (Valkey 9 takes another policy over at
    /// its next tick, which a child does not have.)
    fn usage(&self, adding: &Adding<'_>) -> Result<(), String> {
        let policy = self.context.setting("maxmemory-policy").ok_or("the server does not say its maxmemory-policy")?;
        if policy.ends_with("lfu") {
            self.calls("objectSetLRUOrLFU", || self.server.try_use(adding, Usage::Frequency(USES)));
            let uses = self.calls("the function for a counter of uses", || self.server.try_uses(adding));
            is("objectSetLRUOrLFU", self.command("OBJECT", &[b"FREQ", NAME])? == USES.to_string().into_bytes())?;
            return is("the function for a counter of uses", uses == Some(USES));
        }
        self.calls("objectSetLRUOrLFU", || self.server.try_use(adding, Usage::Idle(IDLE_SECONDS)));
        let idle = self.calls("the function for an age", || self.server.try_idle(adding));
        let own = self.command("OBJECT", &[b"IDLETIME", NAME])?;
        let own = std::str::from_utf8(&own).ok().and_then(|own| own.parse::<u64>().ok()).unwrap_or_default();
        let near = |seconds: u64| seconds.abs_diff(IDLE_SECONDS) <= IDLE_SLACK;
        is("objectSetLRUOrLFU", near(own))?;
        is("the function for an age", idle.is_some_and(near))
    }

    /// The key's value and expiry by the module's API.
    fn by_the_api(&self) -> Option<(Vec<u8>, Option<u64>)> {
        let name = OwnedStr::new(self.context, NAME);
        let mut key = self.context.open_to_write(name.borrow())?;
        let expires_at = key.expires_at();
        if key.kind() != KeyKind::String { None } else { Some((key.string()?.to_vec(), expires_at)) }
    }

    fn command(&self, name: &str, arguments: &[&[u8]]) -> Result<Vec<u8>, String> {
        self.steps.begin(&format!("the command {name}"));
        super::command(self.context, name, arguments)
    }
}

/// What follows a value in the reply to `DUMP`: the version of the format, and a checksum.
const FOOTER_BYTES: usize = 10;
const SHORT: &str = "a DUMP is too short";

fn string(encoding: u8, text: &[u8]) -> Shape {
    Shape { kind: STRING, encoding, text: Some(text.to_vec()) }
}

fn is(function: &str, as_expected: bool) -> Result<(), String> {
    if as_expected { Ok(()) } else { Err(differs(function)) }
}

fn differs(function: &str) -> String {
    format!("{function} does not do in this build what it does in its family")
}
