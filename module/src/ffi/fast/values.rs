//! Values of all types, made and written by the server's own loader and saver of one value.
//!
//! Both work on streams of our own kinds ([`rio`](super::rio)). So encodings, conversions by the server's limits, and
//! counters are the server's.
//!
//! A loader that meets a damaged value ends its server: callers check values first (`Collection::check`).

use std::ffi::c_int;
use std::ptr;

use remora_redis::rdb::{COLLECTION_TYPES, Collection, Content, Value};

use super::rio::{Rio, Sink, Source};
use super::symbols::{Common, Dicts, DictsOnly, Object, Own, Sds, Valkey, ValkeyOnly};
use super::{FastServer, SavedType};

/// `RDBFLAGS_REPLICATION`: what the server's loader passes when it loads from its primary.
const REPLICATION: c_int = 1 << 1;

/// `RDB_TYPE_STREAM_LISTPACKS` and its two later forms.
const STREAM_TYPES: [u8; 3] = [15, 19, 21];

impl Dicts {
    /// As `rdbLoadObject` makes it; null if the server does not take it.
    pub(super) fn value(
        &self,
        only: &DictsOnly,
        common: &Common,
        value: &Value<'_>,
        key: Sds,
        database: c_int,
    ) -> Object {
        match value {
            Value::String(Content::Number(number)) => common.number(*number),
            Value::String(Content::Bytes(bytes)) => {
                let object = common.string(bytes);
                match only {
                    // SAFETY: A string of our own; the function returns it or another in its place.
                    DictsOnly::Redis7(only) => unsafe { (only.encode)(object) },
                    // SAFETY: As above. 0: its unused bytes stay, as in the server's loader.
                    DictsOnly::Redis8(only) | DictsOnly::Valkey8(only) => unsafe { (only.encode)(object, 0) },
                }
            }
            Value::Collection(Collection { kind, bytes }) => {
                let (mut source, mut error) = (Source::new(bytes), 0);
                let rio = ptr::from_mut(&mut source).cast();
                // SAFETY: A stream and a key of our own; by the caller the value was checked.
                unsafe { (self.load)(c_int::from(*kind), rio, key, database, &raw mut error) }
            }
        }
    }
}

impl Valkey {
    pub(super) fn string(&self, common: &Common, bytes: &[u8]) -> Object {
        let object = common.string(bytes);
        // SAFETY: A string of our own; the function returns it or another in its place. 0: its unused bytes stay, as in
        // the server's loader.
        unsafe { (self.encode)(object, 0) }
    }

    /// As `rdbLoadObject` makes it; null if the server does not take it.
    pub(super) fn value(
        &self,
        only: &ValkeyOnly,
        common: &Common,
        value: &Value<'_>,
        key: Sds,
        database: c_int,
    ) -> Object {
        match value {
            Value::String(Content::Number(number)) => common.number(*number),
            Value::String(Content::Bytes(bytes)) => self.string(common, bytes),
            Value::Collection(Collection { kind, bytes }) => {
                let (mut source, mut error) = (Source::new(bytes), 0);
                let (rio, kind) = (ptr::from_mut(&mut source).cast(), c_int::from(*kind));
                match only {
                    // SAFETY: A stream and a key of our own; by the caller the value was checked.
                    ValkeyOnly::Eight(eight) => unsafe { (eight.load)(kind, rio, key, database, &raw mut error) },
                    // SAFETY: As above. The time is used only for fields that expire, which no collection has.
                    ValkeyOnly::Nine(nine) => unsafe {
                        (nine.load)(kind, rio, key, database, &raw mut error, REPLICATION, 0)
                    },
                }
            }
        }
    }
}

/// The type that a server's function writes as one byte.
fn written_type(write: impl FnOnce(*mut Rio)) -> Option<u8> {
    let mut code = None;
    let mut put = |bytes: &[u8]| {
        code = bytes.first().copied();
        true
    };
    let mut sink = Sink::new(&mut put);
    write(ptr::from_mut(&mut sink).cast());
    code
}

impl FastServer {
    /// As which type the server's saver writes that value, in that version of the format. `None`: it is not of the
    /// types that are written here.
    pub(super) fn saved_type(&self, object: Object, version: u16) -> Option<SavedType> {
        let code = match self.symbols.own {
            Own::Dicts(own, _) => written_type(|rio| {
                // SAFETY: A stream of our own; a value of a table, which is only read.
                unsafe { (own.save_type)(rio, object) };
            })?,
            Own::Valkey(_, ValkeyOnly::Eight(only)) => written_type(|rio| {
                // SAFETY: As above.
                unsafe { (only.save_type)(rio, object) };
            })?,
            Own::Valkey(_, ValkeyOnly::Nine(only)) => {
                // SAFETY: A value of a table, which is only read.
                u8::try_from(unsafe { (only.saved_type)(object, version.into()) }).ok()?
            }
        };
        (COLLECTION_TYPES.contains(&code) || STREAM_TYPES.contains(&code)).then_some(SavedType(code))
    }

    /// Writes what follows the key in a record. False: `put` has returned false.
    pub(super) fn save(&self, object: Object, kind: SavedType, put: &mut dyn FnMut(&[u8]) -> bool) -> bool {
        let mut sink = Sink::new(put);
        let rio: *mut Rio = ptr::from_mut(&mut sink).cast();
        // The key is used for types of modules only.
        let key = ptr::null_mut();
        let written = match self.symbols.own {
            // SAFETY: A stream of our own; a value of a table that is not of a module's type, and is only read.
            Own::Dicts(own, _) => unsafe { (own.save)(rio, object, key, 0) },
            // SAFETY: As above.
            Own::Valkey(_, ValkeyOnly::Eight(only)) => unsafe { (only.save)(rio, object, key, 0) },
            // SAFETY: As above, and its own type.
            Own::Valkey(_, ValkeyOnly::Nine(only)) => unsafe { (only.save)(rio, object, key, 0, kind.0) },
        };
        written >= 0
    }
}
