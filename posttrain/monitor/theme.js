{
const t = new URLSearchParams(location.search).get('__theme');
document.documentElement.classList.toggle('dark', t ? t === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches);
}
