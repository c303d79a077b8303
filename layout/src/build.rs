//! A server's program: the id of its build (the note that the linker wrote into it, or its SHA-256), its memory while
//! it runs, and its tables of functions.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read};
use std::ops::Range;
use std::path::Path;

use object::{Object, ObjectSegment, ObjectSymbol, SymbolKind};
use sha2::{Digest, Sha256};

/// The largest program, or file of debug information, that is read: the largest server known, with debug information,
/// has 40 MB. All of it is in memory while it is looked at.
pub const PROGRAM_BYTES_MAX: u64 = 256 << 20;

/// Bytes of the linker's id: 8 (lld's short form) to 64. Other notes are not believed, and the SHA-256 is used.
const ID_BYTES: std::ops::RangeInclusive<usize> = 8..=64;

/// A program in memory.
pub struct Program {
    bytes: Vec<u8>,
}

/// Which build a program is: the name of its layout's file, without the ending.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Build(String);

impl Program {
    /// Reads a program, or a file of debug information.
    ///
    /// # Errors
    /// It cannot be read, or is larger than [`PROGRAM_BYTES_MAX`].
    pub fn read(path: &Path) -> io::Result<Program> {
        let mut bytes = Vec::new();
        File::open(path)?.take(PROGRAM_BYTES_MAX + 1).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > PROGRAM_BYTES_MAX {
            return Err(io::Error::other(format!("it has more than {} MiB", PROGRAM_BYTES_MAX >> 20)));
        }
        Ok(Program { bytes })
    }

    /// A program of these bytes.
    pub fn of(bytes: Vec<u8>) -> Program {
        Program { bytes }
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Its SHA-256, hexadecimal.
    pub fn sha256(&self) -> String {
        hexadecimal(&Sha256::digest(&self.bytes))
    }

    /// The id that the linker wrote into it.
    pub fn linker_id(&self) -> Option<Vec<u8>> {
        let parsed = object::File::parse(&*self.bytes).ok()?;
        let id = parsed.build_id().ok().flatten().filter(|id| ID_BYTES.contains(&id.len()));
        id.map(<[u8]>::to_vec)
    }

    /// Which build it is.
    pub fn build(&self) -> Build {
        match self.linker_id() {
            Some(id) => Build(format!("build-id-{}", hexadecimal(&id))),
            None => Build(format!("sha256-{}", self.sha256())),
        }
    }
}

impl Build {
    /// The build of that name, if it is one: nothing else may become the name of a file.
    pub fn parse(name: &str) -> Option<Build> {
        let digits = name.strip_prefix("build-id-").or_else(|| name.strip_prefix("sha256-"))?;
        let is_hexadecimal = digits.bytes().all(|byte| byte.is_ascii_digit() || matches!(byte, b'a'..=b'f'));
        let fits = ID_BYTES.contains(&(digits.len() / 2)) && digits.len().is_multiple_of(2);
        (is_hexadecimal && fits).then(|| Build(name.to_owned()))
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Build {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

// The memory of a process that runs a program: where the program is in it, and which parts of it are code.

/// The mappings of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Maps {
    mappings: Vec<Mapping>,
    /// Where the beginning of the program is.
    pub program: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Mapping {
    range: Range<u64>,
    is_readable: bool,
    is_writable: bool,
    is_code: bool,
}

impl Maps {
    /// Those of the process with this folder in `/proc`.
    ///
    /// # Errors
    /// The folder cannot be read: the process has ended, or belongs to another user.
    pub fn of(process: &Path) -> io::Result<Maps> {
        let program = fs::read_link(process.join("exe"))?;
        Ok(Maps::parse(&fs::read_to_string(process.join("maps"))?, &program.to_string_lossy()))
    }

    fn parse(text: &str, program: &str) -> Maps {
        let mut maps = Maps::default();
        for line in text.lines() {
            let mut words = line.splitn(6, ' ');
            let (Some(range), Some(rights), Some(offset)) = (words.next(), words.next(), words.next()) else {
                continue;
            };
            let Some(range) = range.split_once('-').and_then(|(begin, end)| {
                Some(u64::from_str_radix(begin, 16).ok()?..u64::from_str_radix(end, 16).ok()?)
            }) else {
                continue;
            };
            let path = words.nth(2).unwrap_or_default().trim_start();
            if path == program && u64::from_str_radix(offset, 16) == Ok(0) && maps.program.is_none() {
                maps.program = Some(range.start);
            }
            let has = |right| rights.contains(right);
            // Code of the program itself: of no library.
            let is_code = has('x') && path == program;
            maps.mappings.push(Mapping { range, is_readable: has('r'), is_writable: has('w'), is_code });
        }
        maps
    }

    /// Whether the program's own code is at that address.
    pub fn is_code(&self, address: u64) -> bool {
        self.mapping(address).is_some_and(|mapping| mapping.is_code)
    }

    /// Whether variables are at that address, and as many bytes behind it.
    pub fn is_data(&self, address: u64, bytes: u64) -> bool {
        let mut at = address;
        let Some(end) = address.checked_add(bytes) else { return false };
        // Initialized variables and others lie in mappings side by side.
        while let Some(mapping) = self.mapping(at).filter(|mapping| mapping.is_readable && mapping.is_writable) {
            if end <= mapping.range.end {
                return true;
            }
            at = mapping.range.end;
        }
        false
    }

    fn mapping(&self, address: u64) -> Option<&Mapping> {
        self.mappings.iter().find(|mapping| mapping.range.contains(&address))
    }
}

// Names: which table of a program says where its functions are.
//
// A server that was linked with `-rdynamic` shows every function to its modules, by the table of dynamic symbols. One
// that was not may still have its full table of symbols, which `strip` removes; distributions keep that of a stripped
// program in a file of debug information.

/// The table that is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Table {
    /// Dynamic symbols: a module can look them up by itself.
    Dynamic,
    /// The program's full table of symbols.
    Symbols,
    /// That of a file of debug information.
    DebugFile,
}

/// Why a program's functions are not found.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NamesError {
    /// It cannot be parsed.
    #[error("{what} is not a program in the ELF format ({why})")]
    Format {
        /// Program or debug file.
        what: &'static str,
        /// What the parser says.
        why: String,
    },
    /// No table has the server's state.
    #[error(
        "the program does not show its functions (it was linked without -rdynamic), and its table of symbols was removed \
         (strip): give the file with its debug information (--debug-file), or a build that was not stripped"
    )]
    Stripped,
    /// A debug file belongs to another program.
    #[error("the debug file is of another program: its build id is {debug}, and that of the program {program}")]
    OtherBuild {
        /// The debug file's id.
        debug: String,
        /// The program's.
        program: String,
    },
    /// A debug file without names.
    #[error("the debug file has no table of symbols with the server's state (`server`)")]
    NoSymbols,
    /// The program has no beginning.
    #[error("the program has no segment at its beginning")]
    NoSegment,
}

/// A name and its place in a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Symbol {
    /// Bytes from the beginning of the program in memory.
    pub offset: u64,
    /// Its size in bytes.
    pub bytes: u64,
}

/// The functions and variables of a program.
#[derive(Clone, Debug)]
pub struct Names {
    table: Table,
    /// `None`: several have that name, as functions of one file may.
    symbols: BTreeMap<String, Option<Symbol>>,
}

impl Names {
    /// The names of a program: the first of its tables that has the server's state, else that of the debug file.
    ///
    /// # Errors
    /// [`NamesError`]: none has it.
    pub fn of(program: &Program, debug_file: Option<&Program>) -> Result<Names, NamesError> {
        let format = |what| move |error: object::Error| NamesError::Format { what, why: error.to_string() };
        let parsed = object::File::parse(program.bytes()).map_err(format("the program"))?;
        let first = parsed.segments().find(|segment| segment.file_range().0 == 0);
        let linked_at = first.map(|segment| segment.address()).ok_or(NamesError::NoSegment)?;
        let tables = [
            (Table::Dynamic, collect(parsed.dynamic_symbols(), linked_at)),
            (Table::Symbols, collect(parsed.symbols(), linked_at)),
        ];
        let has_state = |symbols: &BTreeMap<String, Option<Symbol>>| matches!(symbols.get(STATE), Some(Some(_)));
        if let Some((table, symbols)) = tables.into_iter().find(|(_, symbols)| has_state(symbols)) {
            return Ok(Names { table, symbols });
        }
        let Some(debug_file) = debug_file else { return Err(NamesError::Stripped) };
        let (theirs, ours) = (debug_file.build(), program.build());
        if theirs != ours {
            return Err(NamesError::OtherBuild { debug: theirs.to_string(), program: ours.to_string() });
        }
        let debug = object::File::parse(debug_file.bytes()).map_err(format("the debug file"))?;
        let symbols = collect(debug.symbols(), linked_at);
        if has_state(&symbols) { Ok(Names { table: Table::DebugFile, symbols }) } else { Err(NamesError::NoSymbols) }
    }

    /// The table that is used.
    pub fn table(&self) -> Table {
        self.table
    }

    /// What has that name, if exactly one thing has it.
    pub fn find(&self, name: &str) -> Option<Symbol> {
        self.symbols.get(name).copied().flatten()
    }

    /// Where it is, in bytes from the beginning of the program in memory.
    pub fn offset(&self, name: &str) -> Option<u64> {
        self.find(name).map(|symbol| symbol.offset)
    }
}

/// The variable with the server's state.
pub const STATE: &str = "server";

fn collect<'d>(
    symbols: impl Iterator<Item = impl ObjectSymbol<'d>>,
    linked_at: u64,
) -> BTreeMap<String, Option<Symbol>> {
    let mut found = BTreeMap::new();
    for symbol in symbols.filter(ObjectSymbol::is_definition) {
        let Ok(name) = symbol.name() else { continue };
        if !matches!(symbol.kind(), SymbolKind::Text | SymbolKind::Data) {
            continue;
        }
        let Some(offset) = symbol.address().checked_sub(linked_at) else { continue };
        let place = Symbol { offset, bytes: symbol.size() };
        let known = found.entry(name.to_owned()).or_insert(Some(place));
        if *known != Some(place) {
            *known = None;
        }
    }
    found
}

impl Table {
    /// Its name in a layout.
    pub fn name(self) -> &'static str {
        match self {
            Table::Dynamic => "dynamic",
            Table::Symbols => "symbols",
            Table::DebugFile => "debug-file",
        }
    }

    /// The table in words.
    pub fn words(self) -> &'static str {
        match self {
            Table::Dynamic => "the table of dynamic symbols (the program shows its functions)",
            Table::Symbols => "the program's full table of symbols",
            Table::DebugFile => "the table of symbols of the debug file",
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    /// This test's own program: the linker gives it an id where the machine's does.
    fn own() -> Vec<u8> {
        std::fs::read(std::env::current_exe().unwrap()).unwrap()
    }

    /// Everything that is asked of a file. No answer is expected, but none may end the process.
    fn look(bytes: Vec<u8>) {
        let program = Program::of(bytes);
        let build = program.build();
        assert_eq!(Build::parse(build.name()), Some(build));
        if let Ok(names) = Names::of(&program, None) {
            let _ = names.find("server");
            let _ = names.offset("main");
        }
        let _ = Names::of(&Program::of(Vec::new()), Some(&program)).map(drop);
        let _ = Names::of(&program, Some(&program)).map(drop);
    }

    #[test]
    fn a_program_keeps_its_build_when_bytes_follow_it_and_another_has_another() {
        let (one, mut bytes) = (Program::of(own()), own());
        bytes.extend_from_slice(b"a byte that no segment has");
        let more = Program::of(bytes);
        assert_ne!(one.sha256(), more.sha256());
        if one.linker_id().is_some() {
            assert_eq!(one.build(), more.build());
        }
        let script = Program::of(b"#!/bin/sh\nexec redis-server".to_vec());
        assert_eq!(script.build().name(), format!("sha256-{}", script.sha256()));
    }

    #[test]
    fn a_name_that_is_not_of_a_build_becomes_no_file() {
        for name in ["", "build-id-", "build-id-../../etc/passwd", "sha256-zz", "build-id-abc", "build-id-0011", "x"] {
            assert_eq!(Build::parse(name), None, "{name}");
        }
        assert!(Build::parse("build-id-a50d6825e71f1473").is_some());
    }

    #[test]
    fn a_program_that_is_too_large_is_not_read() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(PROGRAM_BYTES_MAX + 1).unwrap();
        assert!(Program::read(file.path()).err().unwrap().to_string().contains("256 MiB"));
    }

    /// The head of this test's own program and its tables of sections, whose fields are what a hostile file would
    /// change.
    fn small() -> Vec<u8> {
        let mut bytes = own();
        bytes.truncate(64 << 10);
        bytes
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        #[test]
        fn a_hostile_file_ends_nothing(
            changes in proptest::collection::vec((0..4096_usize, any::<u8>()), 1..40),
            length in 0..(64_usize << 10),
        ) {
            let mut bytes = small();
            for (at, byte) in changes {
                if let Some(place) = bytes.get_mut(at) {
                    *place = byte;
                }
            }
            look(bytes.clone());
            bytes.truncate(length);
            look(bytes);
        }

        #[test]
        fn a_file_of_any_bytes_ends_nothing(mut bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
            look(bytes.clone());
            // The magic of ELF, 64 bits, little endian.
            bytes.splice(..bytes.len().min(7), *b"\x7FELF\x02\x01\x01");
            look(bytes);
        }
    }

    /// Fields of the header and of the tables, in a whole program: other bits in each of the first 64 bytes, and in the
    /// tables of segments and of sections.
    #[test]
    fn a_whole_program_with_changed_tables_ends_nothing() {
        let whole = own();
        let sections = u64::from_le_bytes(whole[0x28..0x30].try_into().unwrap()) as usize;
        let places =
            (16..64).chain((64..700).step_by(9)).chain((sections..whole.len().min(sections + 2000)).step_by(41));
        for at in places {
            let mut bytes = whole.clone();
            bytes[at] ^= 0xFF;
            look(bytes);
        }
    }

    const TEXT: &str = "\
55d0c0000000-55d0c0020000 r--p 00000000 fe:01 77   /usr/bin/a server (deleted)
55d0c0020000-55d0c0100000 r-xp 00020000 fe:01 77   /usr/bin/a server (deleted)
55d0c0100000-55d0c0110000 rw-p 00100000 fe:01 77   /usr/bin/a server (deleted)
55d0c0110000-55d0c0120000 rw-p 00000000 00:00 0 
7f0000000000-7f0000010000 r-xp 00000000 fe:01 78   /usr/lib/libc.so.6
nonsense
x-y rw-p";

    #[test]
    fn a_program_has_its_beginning_its_code_and_its_variables() {
        let maps = Maps::parse(TEXT, "/usr/bin/a server (deleted)");
        assert_eq!(maps.program, Some(0x55d0c0000000));
        assert!(maps.is_code(0x55d0c0020000) && !maps.is_code(0x55d0c0100000) && !maps.is_code(0x7f0000000000));
        assert!(maps.is_data(0x55d0c0100000, 0x20000) && !maps.is_data(0x55d0c0100000, 0x20001));
        assert!(!maps.is_data(0x55d0c0020000, 8) && !maps.is_data(u64::MAX, 8));
        assert_eq!(Maps::parse(TEXT, "/usr/bin/other").program, None);
    }

    #[test]
    fn this_process_is_found() {
        let maps = Maps::of(Path::new("/proc/self")).unwrap();
        assert!(maps.program.is_some());
    }
}
