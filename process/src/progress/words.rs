//! Words: how far a piece of work is, for people. Bars, plain lines, `remora status` and the page of `--metrics` say it
//! in the same words.

use std::time::Duration;

use remora_protocol::{Basis, Length};

use super::tracker::Look;
use remora_base::units::{Size, counted, readable};

/// The unit of a [`Meter`](super::Meter).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Bytes, shown as MiB and MiB/s.
    Bytes,
    /// Things with this name, in the singular.
    Count(&'static str),
}

impl Unit {
    fn amount(self, number: u64) -> String {
        match self {
            Unit::Bytes => Size::bytes(number).to_string(),
            Unit::Count(name) => counted(number, name),
        }
    }
}

/// `120 of 256 keys, 46.8 %, 60 keys/s, 2.3 s left`, or what is known of that.
pub fn in_progress(look: &Look, unit: Unit) -> String {
    let mut words = reached(look.position, look.length, unit);
    words.extend(look.permille.map(percent));
    words.extend(look.rate.map(|rate| format!("{}/s", unit.amount(rate as u64))));
    words.push(match look.left {
        Some(left) => time_left(left),
        None => format!("{} so far", readable(look.took)),
    });
    words.join(", ")
}

/// `256 of 256 keys, 100.0 %, 4.3 s in total, 60 keys/s on average`.
pub fn at_the_end(look: &Look, unit: Unit) -> String {
    let mut words = reached(look.position, look.length, unit);
    words.extend(look.permille.map(percent));
    words.push(format!("{} in total", readable(look.took)));
    words.push(format!("{}/s on average", unit.amount(look.average as u64)));
    words.join(", ")
}

fn reached(position: u64, length: Length, unit: Unit) -> Vec<String> {
    let position = match unit {
        Unit::Count(_) if length.basis != Basis::Unknown => position.to_string(),
        unit => unit.amount(position),
    };
    vec![match of_length(length, unit) {
        None => position,
        Some(of) => format!("{position} {of}"),
    }]
}

/// `of about 610 MiB`; `None` if the length is unknown.
pub fn of_length(length: Length, unit: Unit) -> Option<String> {
    let whole = unit.amount(length.bytes);
    match length.basis {
        Basis::Unknown => None,
        Basis::Memory => Some(format!("of at most {whole}")),
        Basis::Former | Basis::Keys => Some(format!("of about {whole}")),
        Basis::Known => Some(format!("of {whole}")),
    }
}

/// `46.8 %`, rounded down, so that 100 means everything.
pub fn percent(permille: u16) -> String {
    format!("{}.{} %", permille / 10, permille % 10)
}

/// `22.75 MiB/s`.
pub fn rate(bytes_per_second: u64) -> String {
    format!("{}/s", Unit::Bytes.amount(bytes_per_second))
}

/// `2.3 s left`.
pub fn time_left(left: Duration) -> String {
    format!("{} left", readable(left))
}

#[cfg(test)]
mod tests {
    use super::super::tracker::known;
    use super::*;

    fn look(position: u64, length: Length, rate: Option<f64>, left: Option<u64>) -> Look {
        let permille = (length.basis != Basis::Unknown).then(|| (position * 1000 / length.bytes) as u16);
        let (left, took) = (left.map(Duration::from_secs), Duration::from_secs(8));
        Look { position, length, permille, rate, left, took, average: 50.0 }
    }

    #[test]
    fn a_line_says_how_far_how_fast_and_how_long() {
        let keys = Unit::Count("key");
        let half = look(100, known(400), Some(50.4), Some(6));
        assert_eq!(in_progress(&half, keys), "100 of 400 keys, 25.0 %, 50 keys/s, 6.0 s left");
        let whole = look(400, known(400), None, None);
        assert_eq!(at_the_end(&whole, keys), "400 of 400 keys, 100.0 %, 8.0 s in total, 50 keys/s on average");
        let unknown = look(3 << 20, Length::default(), Some(1048576.0), None);
        assert_eq!(in_progress(&unknown, Unit::Bytes), "3 MiB, 1 MiB/s, 8.0 s so far");
        assert_eq!(in_progress(&look(7, Length::default(), None, None), keys), "7 keys, 8.0 s so far");
    }

    #[test]
    fn an_estimate_says_that_it_is_one() {
        let of = |basis| of_length(Length { bytes: 610 << 20, basis }, Unit::Bytes);
        assert_eq!(of(Basis::Unknown), None);
        assert_eq!(of(Basis::Memory).as_deref(), Some("of at most 610 MiB"));
        assert_eq!(of(Basis::Former).as_deref(), Some("of about 610 MiB"));
        assert_eq!(of(Basis::Keys).as_deref(), Some("of about 610 MiB"));
        assert_eq!(of(Basis::Known).as_deref(), Some("of 610 MiB"));
    }

    #[test]
    fn a_hundred_percent_means_all() {
        assert_eq!((percent(999), percent(1000), percent(7)), ("99.9 %".into(), "100.0 %".into(), "0.7 %".into()));
    }
}
