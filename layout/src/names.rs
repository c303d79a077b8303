//! Names: which table of a program says where its functions are.
//!
//! A server that was linked with `-rdynamic` shows every function to its modules, by the table of dynamic symbols. One
//! that was not may still have its full table of symbols, which `strip` removes; distributions keep that of a stripped
//! program in a file of debug information.

use std::collections::BTreeMap;

use object::{Object, ObjectSegment, ObjectSymbol, SymbolKind};

use crate::Program;

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
