//! The screen of a terminal, for pages that are shown again and again in place.

use std::env;
use std::io::{self, IsTerminal, Write};

use terminal_size::{Height, Width, terminal_size_of};

use crate::page::{Page, stdout_has_colour};

/// Standard output, if that is a terminal with a cursor.
#[derive(Debug)]
pub struct Screen(());

impl Screen {
    pub fn of_stdout() -> Option<Self> {
        let has_cursor = env::var_os("TERM").is_none_or(|term| term != "dumb");
        (io::stdout().is_terminal() && has_cursor).then_some(Self(()))
    }

    /// Over the former page. What does not fit is left out.
    pub fn show(&self, page: &Page) -> io::Result<()> {
        let page = page.fitted_to(self.size());
        let mut out = io::stdout().lock();
        out.write_all(repainted(&page, stdout_has_colour()).as_bytes())?;
        out.flush()
    }

    /// Columns and rows; the size of a terminal that does not say is the usual one. `kubectl exec` reports it after the start.
    fn size(&self) -> (usize, usize) {
        match terminal_size_of(io::stdout()) {
            Some((Width(columns), Height(rows))) => (columns.into(), rows.into()),
            None => (80, 24),
        }
    }
}

/// Each line replaces that of the former page, so that the screen does not flicker. The last line has no end, which would scroll
/// a full screen.
fn repainted(page: &Page, has_colour: bool) -> String {
    let text = if has_colour { page.coloured() } else { page.text() };
    let lines: Vec<_> = text.lines().map(|line| format!("{line}\x1b[K")).collect();
    format!("\x1b[H{}\x1b[J", lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::page::Severity;

    #[test]
    fn a_repainted_screen_keeps_nothing_of_the_former_page() {
        let mut page = Page::plain("first");
        page.push(Severity::Error, "dead");
        assert_eq!(repainted(&page, false), "\x1b[Hfirst\x1b[K\ndead\x1b[K\x1b[J");
        assert_eq!(repainted(&page, true), "\x1b[Hfirst\x1b[K\n\x1b[31mdead\x1b[0m\x1b[K\x1b[J");
    }
}
