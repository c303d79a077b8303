//! What a server says of its commands (`COMMAND`), in the form of `remora_redis::commands`.

use remora_redis::commands::keys::{Access, Begin, Find, Key};
use remora_redis::resp::Frame;

use crate::error::{Error, Result};
use crate::server::Server;

/// A command or subcommand of a server.
#[derive(Clone, Debug)]
pub struct Described {
    /// Its name, in lower case; that of a subcommand as `xgroup|create`.
    pub name: String,
    /// Number of arguments with the name; negative: at least so many.
    pub arity: i64,
    /// The server's words about it, as `write`.
    pub flags: Vec<String>,
    /// Where its keys are.
    pub keys: Vec<Key>,
}

impl Described {
    /// Whether the server flags it as one that writes.
    pub fn writes(&self) -> bool {
        self.has("write")
    }

    /// Whether the server flags it so.
    pub fn has(&self, flag: &str) -> bool {
        self.flags.iter().any(|known| known == flag)
    }
}

/// The words behind which servers have keys.
const WORDS: [&str; 4] = ["KEYS", "STORE", "STOREDIST", "STREAMS"];

/// Every command of a server, and every subcommand.
///
/// # Errors
/// The server cannot be asked, or answers in a form that is not known.
pub fn of(server: &Server) -> Result<Vec<Described>> {
    let answer = server.client()?.call(&["COMMAND"])?;
    let mut all = Vec::new();
    collect(&answer, &mut all).ok_or_else(|| Error::Garbled("the answer to COMMAND has another form".into()))?;
    all.sort_by(|one: &Described, other| one.name.cmp(&other.name));
    Ok(all)
}

fn collect(list: &Frame, all: &mut Vec<Described>) -> Option<()> {
    for command in list.as_array()? {
        let parts = command.as_array()?;
        let number = |at: usize| parts.get(at).and_then(Frame::as_int);
        let flags: Vec<String> =
            parts.get(2)?.as_array()?.iter().filter_map(Frame::as_str).map(str::to_owned).collect();
        let specifications = parts.get(8).and_then(Frame::as_array);
        let keys = match specifications {
            Some(all) => all.iter().map(key).collect::<Option<_>>()?,
            None => plain(number(3)?, number(4)?, number(5)?, flags.iter().any(|flag| flag == "movablekeys")),
        };
        let name = parts.first()?.as_str()?.to_ascii_lowercase();
        all.push(Described { name, arity: number(1)?, flags, keys });
        if let Some(below) = parts.get(9) {
            collect(below, all)?;
        }
    }
    Some(())
}

/// Of a server before key specifications (Redis 6.2).
fn plain(first: i64, last: i64, step: i64, is_incomplete: bool) -> Vec<Key> {
    let begin = u8::try_from(first).ok().filter(|first| *first > 0);
    let Some(begin) = begin else { return Vec::new() };
    let last = if last < 0 { last } else { last - first };
    let find = Find::Range { last: last as i8, step: step as u8, limit: 0 };
    vec![Key { access: Access::Unsaid, begin: Begin::At(begin), find, is_not_key: false, is_incomplete }]
}

/// A key specification.
fn key(frame: &Frame) -> Option<Key> {
    let flags: Vec<&str> = value(frame, "flags")?.as_array()?.iter().filter_map(Frame::as_str).collect();
    let has = |flag: &str| flags.contains(&flag);
    let access = match () {
        () if has("RO") => Access::Read,
        () if has("RW") => Access::Change,
        () if has("OW") => Access::Overwrite,
        () if has("RM") => Access::Remove,
        () => Access::Unsaid,
    };
    let (begin, at) = (value(frame, "begin_search")?, value(frame, "find_keys")?);
    let (begins, finds) = (value(begin, "spec"), value(at, "spec"));
    let number = |of: Option<&Frame>, name: &str| value(of?, name)?.as_int();
    let begin = match value(begin, "type")?.as_str()? {
        "index" => Begin::At(number(begins, "index")?.try_into().ok()?),
        "keyword" => {
            let word = value(begins?, "keyword")?.as_str()?;
            Begin::Behind(WORDS.iter().find(|known| **known == word)?, number(begins, "startfrom")?.try_into().ok()?)
        }
        _ => Begin::Anywhere,
    };
    let small = |name: &str| number(finds, name).and_then(|number| u8::try_from(number).ok());
    let find = match value(at, "type")?.as_str()? {
        "range" => Find::Range {
            last: number(finds, "lastkey")?.try_into().ok()?,
            step: small("keystep")?,
            limit: small("limit")?,
        },
        "keynum" => Find::Counted { number: small("keynumidx")?, first: small("firstkey")?, step: small("keystep")? },
        _ => Find::Anything,
    };
    Some(Key { access, begin, find, is_not_key: has("not_key"), is_incomplete: has("incomplete") })
}

/// The value of this name in a list of names and values.
fn value<'a>(frame: &'a Frame, wanted: &str) -> Option<&'a Frame> {
    let pairs = frame.as_array()?.chunks_exact(2);
    pairs.into_iter().find(|pair| pair[0].as_str() == Some(wanted)).map(|pair| &pair[1])
}
