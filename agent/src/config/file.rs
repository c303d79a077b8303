//! A configuration file: TOML, with a table for each command and the long names of its options as keys.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::{Arg, ArgAction, Command};
use toml_edit::{Document, Item, Table, Value};

use super::{flag, is_help, options, shown, word};
use crate::exit::{Code, Failure};

/// Bytes of a file at most. One with every option of every command has some ten thousand.
const FILE_LIMIT: u64 = 1 << 20;

/// A file that is TOML.
pub(crate) struct File {
    path: PathBuf,
    document: Document<String>,
}

/// An option in a file.
pub(crate) struct Given {
    pub(crate) name: String,
    /// The file and the line.
    pub(crate) place: String,
    value: Value,
}

impl File {
    /// Reads the file.
    ///
    /// # Errors
    /// It cannot be read, or is not TOML.
    pub(crate) fn read(path: &Path) -> Result<File, Failure> {
        let refused = |text: String| Failure::new(Code::Usage, text);
        let unreadable = |cause| refused(format!("the configuration file {} cannot be read: {cause}", shown(path)));
        let mut text = String::new();
        let file = std::fs::File::open(path).map_err(unreadable)?;
        std::io::Read::read_to_string(&mut std::io::Read::take(file, FILE_LIMIT + 1), &mut text).map_err(unreadable)?;
        if text.len() as u64 > FILE_LIMIT {
            return Err(refused(format!("the configuration file {} has more than {FILE_LIMIT} bytes", shown(path))));
        }
        let document = Document::parse(text.clone()).map_err(|error| {
            let at = line(&text, error.span().map_or(0, |span| span.start));
            refused(format!("{}:{at}: this is not TOML: {}", shown(path), error.message()))
        })?;
        Ok(File { path: path.to_owned(), document })
    }

    /// The options for the command of that path, and for every command.
    ///
    /// # Errors
    /// A key is not one of its options.
    pub(super) fn options(&self, definition: &Command, path: &[String]) -> Result<Vec<Given>, Failure> {
        let mut all = self.of_table(self.document.as_table(), definition, definition, true)?;
        let (mut table, mut command) = (self.document.as_table(), definition);
        for name in path {
            let Some(next) = command.find_subcommand(name) else { return Ok(all) };
            let Some(item) = table.get(name) else { return Ok(all) };
            table = item.as_table().ok_or_else(|| self.not_a_table(table, name))?;
            command = next;
            if command.has_subcommands() {
                self.of_table(table, definition, command, true)?;
            }
        }
        if !path.is_empty() && !command.has_subcommands() {
            // Those of the command itself come first: it may have an option of every command, too.
            let mut own = self.of_table(table, definition, command, false)?;
            own.append(&mut all);
            all = own;
        }
        Ok(all)
    }

    /// The commands that have a table, each as its path.
    pub(super) fn commands(&self, definition: &Command) -> Vec<Vec<String>> {
        let mut found = Vec::new();
        walk(self.document.as_table(), definition, &mut Vec::new(), &mut found);
        found
    }

    /// The options in one table. `has_commands`: tables of commands stand beside them.
    fn of_table(
        &self,
        table: &Table,
        definition: &Command,
        command: &Command,
        has_commands: bool,
    ) -> Result<Vec<Given>, Failure> {
        let mut all = Vec::new();
        for (name, item) in table {
            if has_commands && item.is_table() && command.find_subcommand(name).is_some() {
                continue;
            }
            let place = self.place(table, name);
            let known = |option: &&Arg| option.get_long() == Some(name) && !is_help(option);
            if options(definition, command).find(known).is_none() {
                return Err(unknown(&place, name, definition, command, has_commands));
            }
            let Some(value) = item.as_value() else {
                let text = format!("{place}: {name} is a table; an option has a value or a list of values");
                return Err(Failure::new(Code::Usage, text));
            };
            all.push(Given { name: name.to_owned(), place, value: value.clone() });
        }
        Ok(all)
    }

    fn not_a_table(&self, table: &Table, name: &str) -> Failure {
        let text = format!("{}: {name} is a command: give its options in a table, [{name}]", self.place(table, name));
        Failure::new(Code::Usage, text)
    }

    /// Where a key stands.
    fn place(&self, table: &Table, name: &str) -> String {
        let at = table.key(name).and_then(toml_edit::Key::span).map_or(0, |span| span.start);
        format!("{}:{}", shown(&self.path), line(self.document.raw(), at))
    }
}

impl Given {
    /// The words for the option.
    ///
    /// # Errors
    /// The value has a wrong type.
    pub(super) fn words(&self, option: &Arg) -> Result<Vec<OsString>, Failure> {
        let wrong = |wanted: &str| Failure::new(Code::Usage, format!("{}: {} takes {wanted}", self.place, self.name));
        if matches!(option.get_action(), ArgAction::SetTrue) {
            return match self.value.as_bool() {
                Some(true) => Ok(vec![flag(option)]),
                Some(false) => Ok(Vec::new()),
                None => Err(wrong("true or false")),
            };
        }
        let may_be_empty = option.get_num_args().is_some_and(|values| values.min_values() == 0);
        if let (Some(is_given), true) = (self.value.as_bool(), may_be_empty) {
            return Ok(if is_given { vec![flag(option)] } else { Vec::new() });
        }
        let scalar = |value: &Value| match value {
            Value::String(text) => Some(OsString::from(text.value())),
            Value::Integer(number) => Some(number.value().to_string().into()),
            Value::Float(number) => Some(number.value().to_string().into()),
            _ => None,
        };
        let Value::Array(list) = &self.value else {
            let value = scalar(&self.value).ok_or_else(|| wrong("a text or a number"))?;
            return Ok(vec![word(option, &value)]);
        };
        let values: Option<Vec<OsString>> = list.iter().map(scalar).collect();
        let values = values.ok_or_else(|| wrong("texts or numbers"))?;
        match (option.get_action(), option.get_value_delimiter()) {
            (ArgAction::Append, _) => Ok(values.iter().map(|value| word(option, value)).collect()),
            (_, Some(delimiter)) => {
                let joined = values.join(OsString::from(delimiter.to_string()).as_os_str());
                Ok(vec![word(option, &joined)])
            }
            _ => Err(wrong("one value, not a list")),
        }
    }
}

fn walk(table: &Table, command: &Command, path: &mut Vec<String>, found: &mut Vec<Vec<String>>) {
    for (name, item) in table {
        let (Item::Table(table), Some(next)) = (item, command.find_subcommand(name)) else { continue };
        path.push(next.get_name().to_owned());
        if next.has_subcommands() {
            walk(table, next, path, found);
        } else {
            found.push(path.clone());
        }
        path.pop();
    }
}

/// The error for a key that is not an option, with the one that is most like it.
fn unknown(place: &str, name: &str, definition: &Command, command: &Command, has_commands: bool) -> Failure {
    let commands = command.get_subcommands().map(Command::get_name).filter(|_| has_commands);
    let known = options(definition, command).filter_map(Arg::get_long).chain(commands);
    let nearest = known.map(|known| (distance(name, known), known)).min();
    let hint = match nearest {
        Some((distance, known)) if distance <= LIKE => format!("; did you mean {known}?"),
        _ => String::new(),
    };
    let is_what = match command.get_name() {
        "remora" => "is neither a command nor an option of every command".to_owned(),
        of => format!("is not an option of remora {of}"),
    };
    Failure::new(Code::Usage, format!("{place}: {name} {is_what}{hint}"))
}

/// Letters in which two names may differ for one to be meant for the other.
const LIKE: usize = 2;

/// How many letters must be added, removed or exchanged to make one word of the other (Levenshtein).
fn distance(one: &str, other: &str) -> usize {
    let other: Vec<char> = other.chars().collect();
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (i, a) in one.chars().enumerate() {
        let (mut diagonal, mut left) = (i, i + 1);
        row[0] = left;
        for (j, b) in other.iter().enumerate() {
            let changed = diagonal + usize::from(a != *b);
            diagonal = row[j + 1];
            left = changed.min(diagonal + 1).min(left + 1);
            row[j + 1] = left;
        }
    }
    row[other.len()]
}

/// The line of a byte, from 1.
fn line(text: &str, at: usize) -> usize {
    1 + text.as_bytes().iter().take(at).filter(|byte| **byte == b'\n').count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_near_or_far() {
        assert_eq!((distance("listen", "listen"), distance("listn", "listen"), distance("", "ab")), (0, 1, 2));
        assert_eq!((distance("memroy", "memory"), distance("kitten", "sitting")), (2, 3));
    }

    #[test]
    fn lines_are_counted_from_one() {
        assert_eq!((line("a\nb\n", 0), line("a\nb\n", 2), line("a\nb\n", 9)), (1, 2, 3));
    }
}
