//! Sizes, times and moments as text: `4GiB`, `512MiB`, `90s`, `1h`, `2026-11-25T23:45:00Z`.
//!
//! The parsers are exact: no fractions, no overflow, and an unknown unit is an error that lists the known ones. Sizes
//! have powers of two only: `4GB` is refused, because half of its users would mean the other value.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize, Serializer};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// A number of bytes, written as `4GiB`, `512MiB`, `64KiB` or plain bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Size(u64);

impl Size {
    /// A number of bytes.
    pub const fn bytes(bytes: u64) -> Self {
        Self(bytes)
    }

    /// A number of MiB. Meant for constants: it saturates instead of overflowing.
    pub const fn mebibytes(count: u64) -> Self {
        Self(count.saturating_mul(1 << 20))
    }

    /// The number of bytes.
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl FromStr for Size {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let (number, suffix) = number_and_suffix(text)?;
        let shift = match suffix.to_ascii_lowercase().as_str() {
            "" | "b" => 0,
            "k" | "kib" => 10,
            "m" | "mib" => 20,
            "g" | "gib" => 30,
            "t" | "tib" => 40,
            _ => return Err(UnitError::SizeSuffix(suffix.to_owned())),
        };
        number.checked_mul(1u64 << shift).map(Self).ok_or(UnitError::TooLarge)
    }
}

/// Exact if it is a whole number of a unit (`4GiB`), else with two decimals (`3.66 GiB`).
impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0;
        let Some((unit, name)) = UNITS.into_iter().find(|(unit, _)| bytes >= *unit) else {
            return write!(f, "{bytes} B");
        };
        if bytes.is_multiple_of(unit) {
            return write!(f, "{} {name}", bytes / unit);
        }
        write!(f, "{:.2} {name}", bytes as f64 / unit as f64)
    }
}

impl Serialize for Size {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.0)
    }
}

/// The longest time that can be given, a hundred years: a clock's moment and such a time always have a sum.
const TIME_MAX: Duration = Duration::from_secs(36_500 * 86_400);

/// Parses a time: `500ms`, `90s`, `15m`, `1h`, `2d`, of a hundred years at most. A plain number means seconds.
pub fn parse_duration(text: &str) -> Result<Duration, UnitError> {
    let (number, suffix) = number_and_suffix(text)?;
    let is_short = |time: &Duration| *time <= TIME_MAX;
    let seconds_each = match suffix.to_ascii_lowercase().as_str() {
        "ms" => return Some(Duration::from_millis(number)).filter(is_short).ok_or(UnitError::TooLong),
        "" | "s" => 1,
        "m" | "min" => 60,
        "h" => 3600,
        "d" => 86_400,
        _ => return Err(UnitError::TimeSuffix(suffix.to_owned())),
    };
    number.checked_mul(seconds_each).map(Duration::from_secs).filter(is_short).ok_or(UnitError::TooLong)
}

/// Formats a time for people: `0.8 s`, `42 s`, `3 min 05 s`, `2 h 10 min`.
pub fn readable(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..=9 => format!("{:.1} s", time.as_secs_f64()),
        10..=119 => format!("{seconds} s"),
        120..=7199 => format!("{} min {:02} s", seconds / 60, seconds % 60),
        _ => format!("{} h {:02} min", seconds / 3600, seconds / 60 % 60),
    }
}

/// A count and what is counted, for messages: `1 key`, `2 keys`, `0 copies`. The first word is the noun.
pub fn counted(count: impl TryInto<u64>, one: &str) -> String {
    let count = count.try_into().unwrap_or(u64::MAX);
    if count == 1 {
        return format!("1 {one}");
    }
    let (noun, rest) = one.split_at(one.find(' ').unwrap_or(one.len()));
    match noun.strip_suffix('y').filter(|stem| !stem.ends_with(['a', 'e', 'o', 'u'])) {
        Some(stem) => format!("{count} {stem}ies{rest}"),
        None if ["s", "x", "ch", "sh"].iter().any(|end| noun.ends_with(end)) => format!("{count} {noun}es{rest}"),
        None => format!("{count} {noun}s{rest}"),
    }
}

/// A size that was estimated or measured, in whole steps: more digits would say too much.
pub fn rounded(bytes: u64) -> Size {
    let step = match bytes {
        0..=0xF_FFFF => 1 << 10,
        0x10_0000..=0x3FFF_FFFF => 1 << 20,
        _ => (1 << 30) / 10,
    };
    Size::bytes(bytes / step * step)
}

/// Parses the rate of a network: `10Gbit/s`, `200Mbit`, or bytes per second as a [`Size`]. Bits come in powers of ten.
pub fn parse_bit_rate(text: &str) -> Result<Size, UnitError> {
    let text = text.strip_suffix("/s").unwrap_or(text);
    let (number, suffix) = number_and_suffix(text)?;
    let bits: u64 = match suffix.to_ascii_lowercase().as_str() {
        "kbit" => 1_000,
        "mbit" => 1_000_000,
        "gbit" => 1_000_000_000,
        _ => {
            return text.parse().map_err(|error| match error {
                UnitError::SizeSuffix(suffix) => UnitError::RateSuffix(suffix),
                other => other,
            });
        }
    };
    number.checked_mul(bits).map(|bits| Size(bits / 8)).ok_or(UnitError::TooLarge)
}

/// Why a size or a time is not valid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnitError {
    /// There are no digits at the beginning.
    #[error("expected a whole number, then a unit, as in 512MiB or 90s")]
    NoNumber,
    /// The number, or the number times its unit, exceeds 64 bits.
    #[error("the number is too large")]
    TooLarge,
    /// The time exceeds a hundred years.
    #[error("the time is too long: at most 36500d")]
    TooLong,
    /// The unit of a size is unknown.
    #[error("unknown unit {0:?}: write a whole number, then KiB, MiB, GiB, TiB or nothing for bytes")]
    SizeSuffix(String),
    /// The unit of a time is unknown.
    #[error("unknown unit {0:?}: write a whole number, then ms, s, m, h, d or nothing for seconds")]
    TimeSuffix(String),
    /// The unit of a rate is unknown.
    #[error("unknown unit {0:?}: write a whole number, then kbit, Mbit or Gbit, or KiB, MiB or GiB for bytes")]
    RateSuffix(String),
}

fn number_and_suffix(text: &str) -> Result<(u64, &str), UnitError> {
    let text = text.trim();
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, suffix) = text.split_at(digits);
    if number.is_empty() {
        return Err(UnitError::NoNumber);
    }
    let number = number.parse().map_err(|_| UnitError::TooLarge)?;
    Ok((number, suffix.trim_start()))
}

/// The largest comes first, so that the first that fits is the one to print.
const UNITS: [(u64, &str); 4] = [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];

// Moment: a second, as text and as part of a name.

/// Seconds since 1970, in UTC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Moment(u64);

/// The last second that has a year of four digits.
const LAST: u64 = 253_402_300_799;

impl Moment {
    /// This many seconds after the beginning of 1970.
    pub const fn seconds(seconds: u64) -> Moment {
        Moment(if seconds > LAST { LAST } else { seconds })
    }

    /// The present second, by this host's clock.
    pub fn now() -> Moment {
        Moment::seconds(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()))
    }

    /// Seconds since 1970.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// As part of a name that sorts by time: `20261125T234500Z`.
    pub fn compact(self) -> String {
        self.to_string().chars().filter(char::is_ascii_alphanumeric).collect()
    }

    /// Reads what [`Moment::compact`] has written.
    pub fn from_compact(text: &str) -> Option<Moment> {
        let part = |from: usize, to: usize| text.get(from..to);
        let (date, clock) = (part(0, 4)?.to_owned() + "-" + part(4, 6)? + "-" + part(6, 8)?, part(8, 16)?);
        let clock = [clock.get(0..3)?, clock.get(3..5)?, clock.get(5..8)?].join(":");
        let moment: Moment = format!("{date}{clock}").parse().ok()?;
        (moment.compact() == text).then_some(moment)
    }
}

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = i64::try_from(self.0).unwrap_or_default();
        let date = OffsetDateTime::from_unix_timestamp(seconds).unwrap_or(OffsetDateTime::UNIX_EPOCH);
        f.pad(&date.format(&Rfc3339).unwrap_or_else(|_| self.0.to_string()))
    }
}

impl FromStr for Moment {
    type Err = String;

    fn from_str(text: &str) -> Result<Moment, String> {
        let expected =
            || format!("{text} is not a moment: write 2026-11-25T23:45:00Z (or with +01:00), or seconds since 1970");
        let seconds = match text.parse::<u64>() {
            Ok(seconds) => seconds,
            Err(_) => {
                let date = OffsetDateTime::parse(text, &Rfc3339).map_err(|_| expected())?;
                u64::try_from(date.unix_timestamp()).map_err(|_| expected())?
            }
        };
        if seconds > LAST { Err(expected()) } else { Ok(Moment(seconds)) }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_counted_stands_in_the_right_number() {
        let of = |one: &str| [0_u32, 1, 2].map(|count| counted(count, one));
        assert_eq!(of("key"), ["0 keys", "1 key", "2 keys"]);
        assert_eq!(of("copy"), ["0 copies", "1 copy", "2 copies"]);
        assert_eq!(of("hash"), ["0 hashes", "1 hash", "2 hashes"]);
        assert_eq!(of("address"), ["0 addresses", "1 address", "2 addresses"]);
        assert_eq!(of("replica in step"), ["0 replicas in step", "1 replica in step", "2 replicas in step"]);
    }

    #[test]
    fn sizes_are_read_as_written() {
        let table = [
            ("0", 0),
            ("17", 17),
            ("17b", 17),
            ("64KiB", 65_536),
            ("4 MiB", 4 << 20),
            ("1gib", 1 << 30),
            ("2T", 2 << 40),
        ];
        for (text, bytes) in table {
            assert_eq!(text.parse::<Size>(), Ok(Size(bytes)), "{text}");
        }
    }

    #[test]
    fn doubtful_sizes_are_refused() {
        assert_eq!("4GB".parse::<Size>(), Err(UnitError::SizeSuffix("GB".into())));
        assert_eq!("1.5GiB".parse::<Size>(), Err(UnitError::SizeSuffix(".5GiB".into())));
        assert_eq!("GiB".parse::<Size>(), Err(UnitError::NoNumber));
        assert_eq!("-1".parse::<Size>(), Err(UnitError::NoNumber));
        assert_eq!("16777216TiB".parse::<Size>(), Err(UnitError::TooLarge));
        assert_eq!("99999999999999999999".parse::<Size>(), Err(UnitError::TooLarge));
    }

    #[test]
    fn times_are_read_as_written() {
        assert_eq!(parse_duration("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(parse_duration("90"), Ok(Duration::from_secs(90)));
        assert_eq!(parse_duration("15m"), Ok(Duration::from_secs(900)));
        assert_eq!(parse_duration("1h"), Ok(Duration::from_secs(3600)));
        assert_eq!(parse_duration("2d"), Ok(Duration::from_secs(172_800)));
        assert_eq!(parse_duration("1y"), Err(UnitError::TimeSuffix("y".into())));
    }

    #[test]
    fn a_time_that_no_clock_could_be_set_to_is_refused() {
        for text in ["36501d", "876001h", "18446744073709551615", "18446744073709551615ms", "18446744073709551615d"] {
            assert_eq!(parse_duration(text), Err(UnitError::TooLong), "{text}");
        }
        let longest = parse_duration("36500d").unwrap();
        assert!(std::time::Instant::now().checked_add(longest).is_some());
    }

    #[test]
    fn sizes_and_times_print_for_people() {
        assert_eq!(Size(12).to_string(), "12 B");
        assert_eq!(Size(4 << 30).to_string(), "4 GiB");
        assert_eq!(Size(3_930_000_000).to_string(), "3.66 GiB");
        assert_eq!(readable(Duration::from_millis(840)), "0.8 s");
        assert_eq!(readable(Duration::from_secs(185)), "3 min 05 s");
        assert_eq!(readable(Duration::from_secs(7800)), "2 h 10 min");
    }

    proptest! {
        #[test]
        fn any_text_is_a_size_or_an_error_but_no_panic(text in ".{0,40}") {
            let _ = text.parse::<Size>();
            let _ = parse_duration(&text);
        }

        #[test]
        fn whole_units_survive_printing(count in 1u64..1024, unit in 0usize..UNITS.len()) {
            let size = Size(count * UNITS[unit].0);
            prop_assert_eq!(size.to_string().parse::<Size>(), Ok(size));
        }
    }

    #[test]
    fn sizes_are_rounded_down_to_what_is_known_of_them() {
        assert_eq!(rounded((3 << 20) + 77).to_string(), "3 MiB");
        assert_eq!(rounded(5000).to_string(), "4 KiB");
        assert_eq!(rounded(0).to_string(), "0 B");
    }

    #[test]
    fn rates_of_networks_are_in_bits_and_of_others_in_bytes() {
        let rate = |text: &str| parse_bit_rate(text).unwrap().get();
        assert_eq!([rate("10Gbit/s"), rate("1gbit"), rate("200Mbit/s")], [1_250_000_000, 125_000_000, 25_000_000]);
        assert_eq!([rate("100MiB"), rate("100MiB/s"), rate("8kbit")], [100 << 20, 100 << 20, 1000]);
        assert!(parse_bit_rate("10GB").is_err() && parse_bit_rate("99999999999999999999Gbit").is_err());
        assert_eq!(parse_bit_rate("99999999999Gbit"), Err(UnitError::TooLarge));
        assert_eq!(parse_bit_rate("99999999999TiB"), Err(UnitError::TooLarge));
        assert_eq!(parse_bit_rate(""), Err(UnitError::NoNumber));
    }

    #[test]
    fn moments_are_read_and_written_in_utc() {
        for (text, seconds) in [
            ("2026-11-25T23:45:00Z", 1_795_650_300),
            ("2026-11-26T00:45:00+01:00", 1_795_650_300),
            ("1795650300", 1_795_650_300),
            ("2024-02-29T12:00:00.9Z", 1_709_208_000),
        ] {
            assert_eq!(text.parse::<Moment>().unwrap().get(), seconds, "{text}");
        }
        let moment = Moment::seconds(1_795_650_300);
        assert_eq!((moment.to_string(), moment.compact()), ("2026-11-25T23:45:00Z".into(), "20261125T234500Z".into()));
        for wrong in ["yesterday", "2026-11-25", "2026-11-25T23:45:00", "-1", "1969-01-01T00:00:00Z", "99999999999999"]
        {
            assert!(wrong.parse::<Moment>().is_err(), "{wrong}");
        }
        assert_eq!(Moment::seconds(u64::MAX).to_string(), "9999-12-31T23:59:59Z");
    }
}
