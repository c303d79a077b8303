//! Times that count from the moment at which a command is run.

use crate::text;

/// Where a command has such a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expiry {
    /// Always: it is this argument.
    At(u8, Unit),
    /// If it has the word `EX` or `PX`, from this argument on: the next one is the time.
    Options(u8),
    /// The same, behind as many pairs of key and value as argument 1 says.
    OptionsBehindPairs,
    /// `RESTORE`: argument 2, if it is not 0 and the word `ABSTTL` does not follow.
    Restore,
}

/// The unit of a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Seconds.
    Seconds,
    /// Milliseconds.
    Milliseconds,
}

/// A time that counts from the moment at which the command is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Time {
    /// The time in milliseconds. `None`: the argument is not a number.
    pub milliseconds: Option<i64>,
}

/// Looks for such a time while the arguments of a command arrive, and holds none of them.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    form: Expiry,
    found: Option<Time>,
    next: Next,
}

/// What the next argument that is looked at is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// A word, from this argument on.
    Word(u64),
    /// A time.
    Time(Unit),
    /// An argument of the word before.
    Skipped,
    /// Nothing more has to be looked at.
    Nothing,
}

/// Where `RESTORE` has its first word.
const RESTORE_WORDS: u64 = 4;

impl Times {
    /// For a command of this form.
    pub fn new(form: Expiry) -> Times {
        let next = match form {
            Expiry::At(..) | Expiry::Restore => Next::Word(RESTORE_WORDS),
            Expiry::Options(from) => Next::Word(u64::from(from)),
            Expiry::OptionsBehindPairs => Next::Nothing,
        };
        Times { form, found: None, next }
    }

    /// Whether it has to see this argument, if it is short: at most [`crate::aof::SHORT_BYTES_MAX`] bytes.
    pub fn looks_at(&self, argument: u64) -> bool {
        match self.form {
            Expiry::At(at, _) => argument == u64::from(at),
            Expiry::Restore => argument == 2 || (argument >= RESTORE_WORDS && self.found.is_some()),
            Expiry::OptionsBehindPairs if argument == 1 => true,
            Expiry::Options(_) | Expiry::OptionsBehindPairs => match self.next {
                Next::Word(from) => argument >= from,
                Next::Time(_) | Next::Skipped => true,
                Next::Nothing => false,
            },
        }
    }

    /// Takes an argument that it has to see. `None`: it is too long to be a word or a time.
    pub fn take(&mut self, argument: u64, value: Option<&[u8]>) {
        match self.form {
            Expiry::At(_, unit) => self.found = Some(time(value, unit)),
            Expiry::Restore if argument == 2 => {
                self.found = Some(time(value, Unit::Milliseconds)).filter(|time| time.milliseconds != Some(0));
            }
            Expiry::Restore => {
                if is(value, "ABSTTL") {
                    self.found = None;
                }
            }
            Expiry::OptionsBehindPairs if argument == 1 => {
                let pairs = value.and_then(text::decimal_u64).filter(|pairs| *pairs <= i32::MAX as u64);
                self.next = pairs.map_or(Next::Nothing, |pairs| Next::Word(2 + 2 * pairs));
            }
            Expiry::Options(_) | Expiry::OptionsBehindPairs => self.option(argument, value),
        }
    }

    fn option(&mut self, argument: u64, value: Option<&[u8]>) {
        let words = Next::Word(argument + 1);
        self.next = match self.next {
            Next::Time(unit) => {
                self.found = Some(time(value, unit));
                words
            }
            Next::Skipped => words,
            Next::Nothing => Next::Nothing,
            Next::Word(_) if is(value, "EX") => Next::Time(Unit::Seconds),
            Next::Word(_) if is(value, "PX") => Next::Time(Unit::Milliseconds),
            // What follows is not a word, whatever stands there.
            Next::Word(_) if ["EXAT", "PXAT", "IFEQ", "IFNE", "IFDEQ", "IFDNE"].iter().any(|word| is(value, word)) => {
                Next::Skipped
            }
            // Fields and their values.
            Next::Word(_) if is(value, "FIELDS") => Next::Nothing,
            Next::Word(_) => words,
        };
    }

    /// The time that was found, once all arguments are there.
    pub fn found(&self) -> Option<Time> {
        self.found
    }
}

fn is(value: Option<&[u8]>, word: &str) -> bool {
    value.is_some_and(|value| value.eq_ignore_ascii_case(word.as_bytes()))
}

fn time(value: Option<&[u8]>, unit: Unit) -> Time {
    let number = value.and_then(|value| std::str::from_utf8(value).ok()).and_then(|text| text.parse::<i64>().ok());
    let scale = if unit == Unit::Seconds { 1000 } else { 1 };
    Time { milliseconds: number.and_then(|number| number.checked_mul(scale)) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::super::{Effect, find};
    use super::*;

    /// The time of a command, as a walker asks for it.
    fn of(words: &[&str]) -> Option<Option<i64>> {
        let (Effect::Expiry(form) | Effect::FieldExpiry(form)) = find(words[0].as_bytes()).unwrap().effect else {
            panic!("{words:?}")
        };
        let mut times = Times::new(form);
        for (argument, word) in (0..).zip(words).skip(1) {
            if times.looks_at(argument) {
                times.take(argument, Some(word.as_bytes()).filter(|word| word.len() <= 20));
            }
        }
        times.found().map(|time| time.milliseconds)
    }

    #[test]
    fn times_that_count_from_now_are_found() {
        for (command, wanted) in [
            ("set k v px 1500", Some(1500)),
            ("SET k v NX EX 2", Some(2000)),
            ("set k v xx get px 7", Some(7)),
            ("set k ex px 7", Some(7)),
            ("setex k 3 v", Some(3000)),
            ("psetex k 3 v", Some(3)),
            ("expire k 4", Some(4000)),
            ("expire k -4 gt", Some(-4000)),
            ("pexpire k 5", Some(5)),
            ("getex k ex 6", Some(6000)),
            ("restore k 99 payload", Some(99)),
            ("restore-asking k 99 payload replace idletime 5", Some(99)),
            ("hexpire h 8 fields 1 f", Some(8000)),
            ("hpexpire h 8 nx fields 1 f", Some(8)),
            ("hgetex h px 9 fields 1 f", Some(9)),
            ("hsetex h fnx ex 9 fields 1 f v", Some(9000)),
            ("msetex 2 a ex b 7 px 11", Some(11)),
            ("set k v ifeq ex px 12", Some(12)),
        ] {
            assert_eq!(of(&command.split(' ').collect::<Vec<_>>()), Some(wanted), "{command}");
        }
        assert_eq!(of(&["expire", "k", "many"]), Some(None));
        assert_eq!(of(&["expire", "k", "9223372036854775807"]), Some(None));
    }

    #[test]
    fn what_only_looks_like_such_a_time_is_not_one() {
        for command in [
            "set k v",
            "set ex ex",
            "set k v pxat 1764208000000",
            "set k v exat 1764208000 nx",
            "set k v keepttl",
            "set k v ifeq ex",
            "set k v ifeq px get",
            "getex k persist",
            "getex k pxat 1764208000000",
            "restore k 0 payload",
            "restore k 0 payload replace",
            "restore k 1764208000000 payload replace absttl",
            "restore k 1764208000000 absttl idletime 5 ABSTTL",
            "hsetex h keepttl fields 2 ex 5 px 6",
            "hgetex h persist fields 1 ex",
            "msetex 1 ex 5",
            "msetex 2 a ex b px pxat 1764208000000",
            "msetex x a ex 5",
        ] {
            assert_eq!(of(&command.split(' ').collect::<Vec<_>>()), None, "{command}");
        }
    }
}
