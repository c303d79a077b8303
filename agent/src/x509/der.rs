//! DER: the elements of a certificate, one after the other. Lengths are checked, and nothing is copied.

pub(super) const BOOLEAN: u8 = 0x01;
pub(super) const INTEGER: u8 = 0x02;
pub(super) const OCTETS: u8 = 0x04;
pub(super) const OBJECT: u8 = 0x06;
pub(super) const SEQUENCE: u8 = 0x30;
pub(super) const SET: u8 = 0x31;
pub(super) const CONTEXT_0: u8 = 0xa0;
pub(super) const CONTEXT_3: u8 = 0xa3;
pub(super) const CONTEXT_1_PRIMITIVE: u8 = 0x81;
pub(super) const CONTEXT_2_PRIMITIVE: u8 = 0x82;
/// The kinds of names in a subjectAltName.
pub(super) const DNS_NAME: u8 = 0x82;
pub(super) const IP_ADDRESS: u8 = 0x87;

const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;

/// What is left of the elements.
#[derive(Clone, Copy, Debug)]
pub(super) struct Der<'a>(&'a [u8]);

impl<'a> Der<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Der<'a> {
        Der(bytes)
    }

    /// The next element: its tag and its content. `None` at the end, and where the bytes are no element.
    pub(super) fn next(&mut self) -> Option<(u8, &'a [u8])> {
        let (tag, content, rest) = self.split()?;
        self.0 = rest;
        Some((tag, content))
    }

    /// The content of the next element, which must have this tag.
    pub(super) fn take(&mut self, tag: u8) -> Option<&'a [u8]> {
        self.optional(tag)
    }

    /// The content of the next element if it has this tag; otherwise it stays.
    pub(super) fn optional(&mut self, tag: u8) -> Option<&'a [u8]> {
        let (found, content, rest) = self.split()?;
        (found == tag).then(|| {
            self.0 = rest;
            content
        })
    }

    /// The next element with its tag and length.
    pub(super) fn whole(&mut self, tag: u8) -> Option<&'a [u8]> {
        let before = self.0;
        self.take(tag)?;
        before.get(..before.len() - self.0.len())
    }

    /// The elements inside the next one.
    pub(super) fn inside(&mut self, tag: u8) -> Option<Der<'a>> {
        self.take(tag).map(Der)
    }

    /// The next element as a time, in seconds of Unix time.
    pub(super) fn time(&mut self) -> Option<i64> {
        let (tag, text) = self.next()?;
        let text = std::str::from_utf8(text).ok()?.strip_suffix('Z')?;
        let digits = match tag {
            // Years from 1950 to 2049, as RFC 5280 says.
            UTC_TIME => format!("{}{text}", if text.get(..2)? >= "50" { "19" } else { "20" }),
            GENERALIZED_TIME => text.to_owned(),
            _ => return None,
        };
        if digits.len() != 14 || !digits.bytes().all(|digit| digit.is_ascii_digit()) {
            return None;
        }
        let part = |from: usize, to: usize| digits.get(from..to)?.parse::<i64>().ok();
        let days = days_since_1970(part(0, 4)?, part(4, 6)?, part(6, 8)?);
        Some(((days * 24 + part(8, 10)?) * 60 + part(10, 12)?) * 60 + part(12, 14)?)
    }

    /// Tag and content of the next element, and what follows it.
    fn split(&self) -> Option<(u8, &'a [u8], &'a [u8])> {
        let (&[tag, first], rest) = self.0.split_first_chunk()?;
        let (length, rest) = match first {
            0..=0x7f => (usize::from(first), rest),
            // A length of at most four bytes.
            0x81..=0x84 => {
                let (bytes, rest) = rest.split_at_checked(usize::from(first & 0x7f))?;
                (bytes.iter().fold(0_usize, |length, byte| length << 8 | usize::from(*byte)), rest)
            }
            _ => return None,
        };
        let (content, rest) = rest.split_at_checked(length)?;
        Some((tag, content, rest))
    }
}

/// Days from 1970-01-01 to a day of the Gregorian calendar. The year begins in March here, so that the leap day is its
/// last.
fn days_since_1970(year: i64, month: i64, day: i64) -> i64 {
    let (year, month) = if month <= 2 { (year - 1, month + 9) } else { (year, month - 3) };
    let (era, of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let of_year = (153 * month + 2) / 5 + day - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

/// The calendar's date of a time, as `2026-11-27`.
pub(super) fn date(unix: i64) -> String {
    let days = unix.div_euclid(86_400) + 719_468;
    let (era, of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let (month, year) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    format!("{:04}-{month:02}-{day:02}", era * 400 + year_of_era + year)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_and_days_agree() {
        for (days, text) in [(0, "1970-01-01"), (11_016, "2000-02-29"), (20_784, "2026-11-27"), (-1, "1969-12-31")] {
            assert_eq!(date(days * 86_400 + 5), text);
            let part = |from: usize, to: usize| text[from..to].parse().unwrap_or(0);
            assert_eq!(days_since_1970(part(0, 4), part(5, 7), part(8, 10)), days, "{text}");
        }
    }

    #[test]
    fn lengths_beyond_the_end_are_no_element() {
        for bytes in
            [&[0x30, 2, 1][..], &[0x30, 0x84, 0xff, 0xff, 0xff, 0xff], &[0x30, 0x85, 1, 1, 1, 1, 1], &[0x30], &[]]
        {
            assert_eq!(Der::new(bytes).next(), None, "{bytes:?}");
        }
    }
}
