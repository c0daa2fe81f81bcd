//! Lines with a severity. On a terminal a warning is yellow and an error is red; elsewhere lines have no colour. `NO_COLOR` and
//! `CLICOLOR_FORCE` decide otherwise, as anstream reads them.

use std::io::{self, Write};

use anstream::{AutoStream, ColorChoice};
use anstyle::{AnsiColor, Style};

/// How bad it is what a line says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// Needs attention.
    Warning,
    /// Does not work.
    Error,
}

impl Severity {
    const fn style(self) -> Style {
        let colour = match self {
            Self::Warning => AnsiColor::Yellow,
            Self::Error => AnsiColor::Red,
        };
        colour.on_default()
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    severity: Option<Severity>,
    text: String,
}

impl Line {
    fn coloured(&self) -> String {
        match self.severity.map(Severity::style) {
            Some(style) => format!("{style}{}{style:#}", self.text),
            None => self.text.clone(),
        }
    }
}

/// What a command prints, line by line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Page(Vec<Line>);

impl Page {
    /// Without a severity: each line of a text.
    pub fn plain(text: &str) -> Self {
        Self(text.lines().map(|line| Line { severity: None, text: line.to_owned() }).collect())
    }

    pub fn push(&mut self, severity: impl Into<Option<Severity>>, text: impl Into<String>) {
        self.0.push(Line { severity: severity.into(), text: text.into() });
    }

    pub fn append(&mut self, mut other: Self) {
        self.0.append(&mut other.0);
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// With the codes of colours.
    pub(crate) fn coloured(&self) -> String {
        self.0.iter().map(|line| format!("{}\n", line.coloured())).collect()
    }

    pub fn text(&self) -> String {
        self.0.iter().map(|line| format!("{}\n", line.text)).collect()
    }

    /// The page as it fits a screen: long lines take several rows, and the last row says how many rows are left out.
    #[must_use]
    pub fn fitted_to(&self, (columns, rows): (usize, usize)) -> Self {
        let (columns, rows) = (columns.max(1), rows.max(1));
        let mut fitted = Self::default();
        for Line { severity, text } in &self.0 {
            let mut rest = text.as_str();
            while let Some((end, _)) = rest.char_indices().nth(columns) {
                let (row, after) = rest.split_at(end);
                fitted.push(*severity, row);
                rest = after;
            }
            fitted.push(*severity, rest);
        }
        if fitted.0.len() > rows {
            let left_out = fitted.0.len() + 1 - rows;
            fitted.0.truncate(rows - 1);
            fitted.push(None, format!("... {left_out} more"));
        }
        fitted
    }

    /// To standard output, in colour if that shows it.
    pub fn print(&self) -> io::Result<()> {
        self.write(&mut anstream::stdout().lock())
    }

    fn write(&self, out: &mut impl Write) -> io::Result<()> {
        out.write_all(self.coloured().as_bytes())?;
        out.flush()
    }
}

/// The line on standard error that a command ends with, or begins with if it shows less than asked for.
pub fn complain(severity: Severity, text: &str) {
    let line = Line { severity: Some(severity), text: text.to_owned() };
    // Without standard error there is no place for this.
    let _written = writeln!(anstream::stderr().lock(), "{}", line.coloured());
}

/// Whether codes of colours reach a reader of standard output.
pub(crate) fn stdout_has_colour() -> bool {
    !matches!(AutoStream::choice(&io::stdout()), ColorChoice::Never)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page() -> Page {
        let mut page = Page::plain("first\nsecond\n");
        page.push(Severity::Warning, "look");
        page.push(Severity::Error, "dead");
        page
    }

    fn through(choice: ColorChoice) -> String {
        let mut out = AutoStream::new(Vec::new(), choice);
        page().write(&mut out).expect("written");
        String::from_utf8(out.into_inner()).expect("text")
    }

    #[test]
    fn severity_has_a_colour_where_colours_are_shown_and_none_elsewhere() {
        assert_eq!(through(ColorChoice::Always), "first\nsecond\n\x1b[33mlook\x1b[0m\n\x1b[31mdead\x1b[0m\n");
        assert_eq!(through(ColorChoice::Never), "first\nsecond\nlook\ndead\n");
        assert_eq!(page().text(), through(ColorChoice::Never));
    }

    #[test]
    fn a_page_fits_the_screen() {
        let fitted = |size| page().fitted_to(size).text();
        assert_eq!(fitted((80, 4)), "first\nsecond\nlook\ndead\n");
        assert_eq!(fitted((80, 3)), "first\nsecond\n... 2 more\n");
        assert_eq!(fitted((4, 8)), "firs\nt\nseco\nnd\nlook\ndead\n");
        assert_eq!(fitted((80, 0)), "... 4 more\n");
    }
}
