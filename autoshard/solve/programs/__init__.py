"""Integer and linear programs, solved by HiGHS."""
