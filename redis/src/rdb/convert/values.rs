//! Values: the elements of a listpack, written as other types have them.

use super::super::input::malformed;
use super::super::packed::Element;
use super::super::put_length;
use super::format::Trouble;
use super::ways::Form;

/// What stands for "expires never" in Valkey's hashes.
pub(super) const NEVER: i64 = -1;

/// The time from which a hash written for Redis counts the times of its fields. The server adds it to each of them; it
/// needs only to be before all of them, which are not known yet when it is written.
pub(super) const FIELD_TIME_BASE: u64 = 1;

/// Writes the elements of a listpack in another form.
pub(super) fn put_form(form: Form, elements: &[Element<'_>], out: &mut Vec<u8>) -> Result<(), Trouble> {
    let each = match form {
        Form::Elements => 1,
        Form::Pairs | Form::Scores => 2,
        Form::TimedFields | Form::UntimedFields => 3,
    };
    if elements.is_empty() || !elements.len().is_multiple_of(each) {
        return Err(malformed("the number of elements of a listpack").into());
    }
    put_length(out, (elements.len() / each) as u64);
    for group in elements.chunks_exact(each) {
        match (form, group) {
            (Form::Elements, [element]) => put_element(out, *element),
            (Form::Pairs, [field, value]) | (Form::UntimedFields, [field, value, _]) => {
                put_element(out, *field);
                put_element(out, *value);
            }
            (Form::Scores, [member, score]) => {
                put_element(out, *member);
                out.extend_from_slice(&score_of(*score)?.to_le_bytes());
            }
            (Form::TimedFields, [field, value, Element::Number(time @ 0..)]) => {
                put_element(out, *field);
                put_element(out, *value);
                out.extend_from_slice(&(if *time == 0 { NEVER } else { *time }).to_le_bytes());
            }
            _ => return Err(malformed("the time of a field").into()),
        }
    }
    Ok(())
}

/// Writes an element as a string; a number in binary where servers do so.
pub(super) fn put_element(out: &mut Vec<u8>, element: Element<'_>) {
    match element {
        Element::Text(text) => {
            put_length(out, text.len() as u64);
            out.extend_from_slice(text);
        }
        Element::Number(number) => {
            if let Ok(number) = i8::try_from(number) {
                out.extend_from_slice(&[0xC0, number as u8]);
            } else if let Ok(number) = i16::try_from(number) {
                out.push(0xC1);
                out.extend_from_slice(&number.to_le_bytes());
            } else if let Ok(number) = i32::try_from(number) {
                out.push(0xC2);
                out.extend_from_slice(&number.to_le_bytes());
            } else {
                put_element(out, Element::Text(number.to_string().as_bytes()));
            }
        }
    }
}

/// A score as servers write it into a listpack: a number, or text for one with a fraction and for the infinities.
fn score_of(element: Element<'_>) -> Result<f64, Trouble> {
    let score = match element {
        Element::Number(number) => Some(number as f64),
        Element::Text(text) => std::str::from_utf8(text).ok().and_then(|text| text.parse::<f64>().ok()),
    };
    score.filter(|score| !score.is_nan()).ok_or_else(|| malformed("a score").into())
}

/// The name of a module's type: nine characters of six bits, and ten bits for its version.
pub(super) fn module_name(id: u64) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let letter = |place: u32| LETTERS.get((id >> (10 + 6 * place)) as usize & 0x3F).copied().unwrap_or_default();
    (0..9).rev().map(|place| char::from(letter(place))).collect()
}
